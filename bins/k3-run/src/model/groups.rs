//! The rows of a step by the experts they chose: which experts, and for each its rows.

use k3_shared::ids::{ExpertIdx, expert_file_ranks};

use super::{
    Routing,
    workspace::{sized, vec_bytes},
};

/// The routings of a step and layer, and the same turned around. Buffers are reused from layer to layer.
#[derive(Debug, Default)]
pub(super) struct ExpertGroups {
    /// Never shrinks, so that the lists inside keep their memory; the step's are the first ones.
    routings: Vec<Routing>,
    num_rows: usize,
    /// Place of each expert in the layer's file.
    ranks: Vec<u32>,
    /// The distinct experts in ascending file rank.
    distinct: Vec<ExpertIdx>,
    /// By expert: where its rows begin in `rows`; one more entry at the end.
    starts: Vec<u32>,
    /// Rows by expert, ascending within one.
    rows: Vec<u32>,
    /// `[rows, top_k]`: where in `rows` each choice stands.
    places: Vec<u32>,
}

impl ExpertGroups {
    /// The routings of the step's rows.
    pub(super) fn routings(&self) -> &[Routing] {
        &self.routings[..self.num_rows]
    }

    /// Room for the routings of so many rows, to be filled before [`Self::turn`].
    pub(super) fn routings_mut(&mut self, num_rows: usize) -> &mut [Routing] {
        if self.routings.len() < num_rows {
            self.routings.reserve_exact(num_rows - self.routings.len());
            self.routings.resize_with(num_rows, Routing::default);
        }
        self.num_rows = num_rows;
        &mut self.routings[..num_rows]
    }

    /// Turn the routings around.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "rows times experts of a step are far fewer than a u32 counts"
    )]
    pub(super) fn turn(&mut self, num_experts: usize) {
        if self.ranks.len() != num_experts {
            self.ranks = expert_file_ranks(num_experts);
        }
        let routings = &self.routings[..self.num_rows];
        let choices: usize = routings.iter().map(|r| r.experts.len()).sum();
        let starts = sized(&mut self.starts, num_experts + 1);
        starts.fill(0);
        for expert in routings.iter().flat_map(|r| &r.experts) {
            starts[expert.get() + 1] += 1;
        }
        self.distinct.clear();
        self.distinct.reserve_exact(num_experts.min(choices));
        for expert in (0..num_experts as u32).map(ExpertIdx) {
            if starts[expert.get() + 1] > 0 {
                self.distinct.push(expert);
            }
            starts[expert.get() + 1] += starts[expert.get()];
        }
        let ranks = &self.ranks;
        self.distinct.sort_unstable_by_key(|e| ranks[e.get()]);

        let rows = sized(&mut self.rows, choices);
        let places = sized(&mut self.places, choices).iter_mut();
        let each = (0u32..)
            .zip(routings)
            .flat_map(|(row, routing)| routing.experts.iter().map(move |&expert| (row, expert)));
        // Each start moves on to the next expert's as its rows are entered, and is set back after.
        for (place, (row, expert)) in places.zip(each) {
            let next = &mut starts[expert.get()];
            rows[*next as usize] = row;
            *place = *next;
            *next += 1;
        }
        starts.copy_within(..num_experts, 1);
        starts[0] = 0;
    }

    /// The distinct experts of the step in ascending file rank.
    pub(super) fn distinct(&self) -> &[ExpertIdx] {
        &self.distinct
    }

    /// Where the rows of `expert` begin among all choices in the order of experts, and the rows.
    pub(super) fn rows_of(&self, expert: ExpertIdx) -> (usize, &[u32]) {
        let start = self.starts[expert.get()] as usize;
        let end = self.starts[expert.get() + 1] as usize;
        (start, &self.rows[start..end])
    }

    /// Where each choice of `row` stands among all choices in the order of experts, in selection order.
    pub(super) fn places(&self, row: usize, top_k: usize) -> &[u32] {
        &self.places[row * top_k..(row + 1) * top_k]
    }

    /// Bytes of memory the buffers hold.
    pub(super) fn allocated_bytes(&self) -> usize {
        let lists = |r: &Routing| vec_bytes(&r.experts) + vec_bytes(&r.weights);
        let indices = [&self.ranks, &self.starts, &self.rows, &self.places];
        vec_bytes(&self.routings)
            + self.routings.iter().map(lists).sum::<usize>()
            + vec_bytes(&self.distinct)
            + indices.into_iter().map(vec_bytes).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_found_under_its_expert_and_at_its_place() {
        let chosen: [&[u32]; 4] = [&[3, 0, 7], &[7, 3, 1], &[5, 1, 0], &[3, 7, 5]];
        let mut groups = ExpertGroups::default();
        for num_rows in [4, 2, 3] {
            for (routing, experts) in groups.routings_mut(num_rows).iter_mut().zip(chosen) {
                routing.experts = experts.iter().copied().map(ExpertIdx).collect();
            }
            groups.turn(9);
            let ranks = expert_file_ranks(9);
            let mut all: Vec<u32> = chosen[..num_rows].concat();
            all.sort_unstable_by_key(|&e| ranks[e as usize]);
            all.dedup();
            assert!(groups.distinct().iter().map(|e| e.0).eq(all));
            for expert in (0..9).map(ExpertIdx) {
                let (start, rows) = groups.rows_of(expert);
                let want = (0u32..).zip(&chosen[..num_rows]);
                let want = want.filter(|(_, experts)| experts.contains(&expert.0));
                assert!(rows.iter().copied().eq(want.map(|(row, _)| row)));
                for (at, &row) in rows.iter().enumerate() {
                    let choice = chosen[row as usize].iter().position(|&e| e == expert.0);
                    let place = groups.places(row as usize, 3)[choice.unwrap()];
                    assert_eq!(place as usize, start + at);
                }
            }
        }
    }
}
