//! `model.safetensors.index.json`, streamed: which file is said to hold which tensor.

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    io::{BufReader, ErrorKind, Read as _, Seek as _},
    path::Path,
};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::Slots;
use crate::{
    config::{Config, Mlp},
    formats::{
        census::{Problem, ProblemList},
        safetensors::is_lfs_pointer,
    },
    names::{ExpertTensor, TOP_TENSORS, TensorRole, layer_tensors},
};

/// Its file name.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

const UNLISTED: u16 = u16::MAX;
const CHUNK_BYTES: usize = 256 << 10;

/// The index, two bytes a text tensor.
#[derive(Debug)]
pub struct Index {
    /// The files it names.
    pub files: Vec<String>,
    /// Tensors that are not the text model's, each with the number of its file.
    pub others: Vec<(String, u16)>,
    /// Data bytes of all shards together (`metadata.total_size`), where it says.
    pub total_size: Option<u64>,
    /// Names that occur twice, and file names that are none.
    pub problems: Vec<Problem>,
    of_slot: Vec<u16>,
}

impl Index {
    /// Read the index in `dir`; `None` if there is none.
    ///
    /// # Errors
    /// If it is a dangling link, cannot be read, or is not an index.
    pub fn open(dir: &Path, config: &Config, slots: &Slots) -> Result<Option<Self>, Problem> {
        let path = dir.join(INDEX_FILE);
        let failed = |message: String| Problem::of(INDEX_FILE, message);
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return match std::fs::read_link(&path) {
                    Ok(target) => Err(failed(super::shard::dangling(&target))),
                    Err(_) => Ok(None),
                };
            }
            Err(e) => return Err(failed(format!("cannot be read: {e}"))),
        };
        let mut start = Vec::with_capacity(8);
        let read = (&mut file).take(8).read_to_end(&mut start);
        read.and_then(|_| file.rewind())
            .map_err(|e| failed(format!("cannot be read: {e}")))?;
        if is_lfs_pointer(&start) {
            let message =
                "is a Git-LFS pointer, not the file itself; run `git lfs pull` in the folder";
            return Err(failed(message.into()));
        }
        let mut reader = Reader {
            config,
            slots,
            index: Self {
                files: Vec::new(),
                others: Vec::new(),
                total_size: None,
                problems: Vec::new(),
                of_slot: vec![UNLISTED; slots.len()],
            },
            problems: ProblemList::new(INDEX_FILE),
            numbers: HashMap::new(),
            last: 0,
            has_map: false,
        };
        let mut json =
            serde_json::Deserializer::from_reader(BufReader::with_capacity(CHUNK_BYTES, file));
        (&mut reader)
            .deserialize(&mut json)
            .and_then(|()| json.end())
            .map_err(|e| failed(format!("is no shard index: {e}; download it again")))?;
        if !reader.has_map {
            return Err(failed("has no weight_map; download it again".into()));
        }
        reader.index.problems = reader.problems.into_vec();
        Ok(Some(reader.index))
    }

    /// Number of the file said to hold a text tensor.
    pub fn file_of(&self, slot: usize) -> Option<u16> {
        self.of_slot.get(slot).copied().filter(|&f| f != UNLISTED)
    }

    /// Name of a file by its number.
    pub fn file_name(&self, number: u16) -> Option<&str> {
        self.files.get(usize::from(number)).map(String::as_str)
    }

    /// Number of a file by its name.
    pub fn number(&self, name: &str) -> Option<u16> {
        let at = self.files.iter().position(|f| f == name)?;
        u16::try_from(at).ok()
    }

    /// Listed text tensors of one file.
    pub fn slots_of(&self, number: u16) -> impl Iterator<Item = usize> + '_ {
        let listed = self.of_slot.iter().enumerate();
        listed.filter_map(move |(slot, &file)| (file == number).then_some(slot))
    }

    /// For each file, whether it is said to hold a text tensor of the first `layers` layers or beside them.
    pub fn needed_files(&self, slots: &Slots, layers: usize) -> Vec<bool> {
        let mut needed = vec![false; self.files.len()];
        for (slot, &file) in self.of_slot.iter().enumerate() {
            if slots.is_within(slot, layers)
                && let Some(flag) = needed.get_mut(usize::from(file))
            {
                *flag = true;
            }
        }
        needed
    }

    /// Whether every text tensor of the first `layers` layers and beside them is listed.
    pub fn is_complete(&self, config: &Config, slots: &Slots, layers: usize) -> bool {
        let mut expected = TOP_TENSORS.len();
        for layer in config.layers().take(layers) {
            expected += layer_tensors(config, layer).count();
            if config.mlp(layer) == Mlp::Moe {
                expected += config.moe.num_experts * ExpertTensor::ALL.len();
            }
        }
        let listed = self.of_slot.iter().enumerate();
        let listed =
            listed.filter(|(slot, file)| **file != UNLISTED && slots.is_within(*slot, layers));
        listed.count() == expected
    }
}

struct Reader<'c> {
    config: &'c Config,
    slots: &'c Slots,
    index: Index,
    problems: ProblemList<'static>,
    numbers: HashMap<String, u16>,
    /// Number of the file named last; neighbours in the map mostly share it.
    last: u16,
    has_map: bool,
}

enum Key {
    Text(usize),
    Other(String),
}

impl Reader<'_> {
    fn number(&mut self, name: &str) -> Option<u16> {
        if self.index.file_name(self.last) == Some(name) {
            return Some(self.last);
        }
        if let Some(&number) = self.numbers.get(name) {
            self.last = number;
            return Some(number);
        }
        let is_file_name = Path::new(name).file_name() == Some(name.as_ref());
        let number = u16::try_from(self.index.files.len())
            .ok()
            .filter(|&n| n != UNLISTED);
        let (true, Some(number)) = (is_file_name, number) else {
            self.problems
                .file(format!("names {name:?}, which is no file of the folder"));
            return None;
        };
        self.index.files.push(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        self.last = number;
        Some(number)
    }

    fn enter(&mut self, key: Key, number: Option<u16>) {
        let Some(number) = number else { return };
        match key {
            Key::Other(name) => self.index.others.push((name, number)),
            Key::Text(slot) => {
                let Some(place) = self.index.of_slot.get_mut(slot) else {
                    return;
                };
                if *place != UNLISTED {
                    let name = self.slots.role(slot).map(TensorRole::name);
                    self.problems.file(format!(
                        "lists {} twice",
                        name.as_deref().unwrap_or("a tensor")
                    ));
                }
                *place = number;
            }
        }
    }
}

impl<'de> DeserializeSeed<'de> for &mut Reader<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Reader<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "weight_map" => {
                    self.has_map = true;
                    map.next_value_seed(WeightMap(self))?;
                }
                "metadata" => {
                    let metadata: Value = map.next_value()?;
                    // Some writers put a float here.
                    #[expect(
                        clippy::cast_possible_truncation,
                        clippy::cast_sign_loss,
                        reason = "a size is a whole positive number; anything else will not equal the sum it is compared with"
                    )]
                    let size = metadata
                        .get("total_size")
                        .and_then(|size| size.as_u64().or(size.as_f64().map(|f| f as u64)));
                    self.index.total_size = size;
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

struct WeightMap<'r, 'c>(&'r mut Reader<'c>);

impl<'de> DeserializeSeed<'de> for WeightMap<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("weight_map as an object of file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let reader = self.0;
        while let Some(key) = map.next_key_seed(KeyOf(reader))? {
            let number = map.next_value_seed(FileOf(reader))?;
            reader.enter(key, number);
        }
        Ok(())
    }
}

/// A tensor name to its number, without keeping the name.
struct KeyOf<'r, 'c>(&'r Reader<'c>);

impl<'de> DeserializeSeed<'de> for KeyOf<'_, '_> {
    type Value = Key;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Key, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyOf<'_, '_> {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Key, E> {
        Ok(match TensorRole::parse(name, self.0.config) {
            Some(role) => Key::Text(self.0.slots.of(role)),
            None => Key::Other(name.to_owned()),
        })
    }
}

/// A file name to its number.
struct FileOf<'r, 'c>(&'r mut Reader<'c>);

impl<'de> DeserializeSeed<'de> for FileOf<'_, '_> {
    type Value = Option<u16>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<u16>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for FileOf<'_, '_> {
    type Value = Option<u16>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a file name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Option<u16>, E> {
        Ok(self.0.number(name))
    }
}
