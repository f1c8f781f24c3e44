//! The index against the headers.

use std::collections::HashMap;

use k3_shared::{
    checkpoint::{INDEX_FILE, Index, Slots, StoredTensor},
    formats::census::{Problem, ProblemList},
    names::TensorClass,
};

use crate::survey::Finding;

/// The index, as the shards are compared with it.
pub(crate) struct Listing<'i> {
    pub(crate) index: Option<&'i Index>,
    slots: &'i Slots,
    others: HashMap<&'i str, u16>,
}

impl<'i> Listing<'i> {
    pub(crate) fn new(index: Option<&'i Index>, slots: &'i Slots) -> Self {
        let others = index.map_or(&[][..], |index| index.others.as_slice());
        Self {
            index,
            slots,
            others: others
                .iter()
                .map(|(name, file)| (name.as_str(), *file))
                .collect(),
        }
    }

    /// Where the index puts a tensor, if it lists it.
    fn file_of(&self, index: &Index, tensor: &StoredTensor<'_>) -> Option<u16> {
        match tensor.role {
            Some(role) => index.file_of(self.slots.of(role)),
            None => self.others.get(tensor.name).copied(),
        }
    }
}

/// Header to index; the other direction is what [`assemble`] reports missing, and [`check_total`].
pub(crate) fn compare_with_index(
    listing: &Listing<'_>,
    index: &Index,
    number: u16,
    tensor: &StoredTensor<'_>,
    problems: &mut ProblemList<'_>,
) {
    match listing.file_of(index, tensor) {
        Some(listed) if listed == number => {}
        Some(listed) => {
            let other = index.file_name(listed).unwrap_or_default();
            let message = format!("is here, but the index puts it into {other}");
            problems.tensor(tensor.name, tensor.offset, message);
        }
        None => problems.tensor(
            tensor.name,
            tensor.offset,
            "is here, but the index does not list it",
        ),
    }
}

/// Index to headers, for what is not the text model's, and the index's sum.
pub(crate) fn check_total(index: &Index, findings: &[Finding], absent: &[String]) -> Vec<Problem> {
    let mut problems = ProblemList::new(INDEX_FILE);
    let (mut all_usable, mut data_bytes) = (absent.is_empty(), 0u64);
    for finding in findings {
        let is_named = index.number(&finding.scan.file.name).is_some();
        all_usable &= is_named && finding.scan.usable;
        if !is_named || !finding.scan.usable {
            continue;
        }
        let data = finding.scan.bytes - finding.scan.header_bytes;
        data_bytes = data_bytes.saturating_add(data);
        check_others(index, finding, &mut problems);
    }
    if all_usable
        && let Some(total) = index.total_size
        && total != data_bytes
    {
        problems.file(format!(
            "says total_size {total}, but the shards hold {data_bytes} bytes; is it of another download?"
        ));
    }
    problems.into_vec()
}

/// The headers' side names each tensor that is not listed; here only numbers are left to compare.
fn check_others(index: &Index, finding: &Finding, problems: &mut ProblemList<'_>) {
    let name = &finding.scan.file.name;
    let number = index.number(name);
    let listed = index
        .others
        .iter()
        .filter(|(_, f)| Some(*f) == number)
        .count() as u64;
    let text: u64 = finding
        .classes
        .iter()
        .filter(|(class, _)| *class != TensorClass::Vision)
        .map(|(_, totals)| totals.tensors)
        .sum();
    let found = finding.scan.num_tensors.saturating_sub(text);
    if listed > found {
        problems.file(format!(
            "lists {listed} tensors other than text in {name}, which has {found}"
        ));
    }
}
