//! Something put between files and the disk: a slow disk, a failing one.

use std::{fmt, path::Path, sync::Arc};

use super::{Device, DirectFile};

type Wrap = dyn Fn(&Path, Box<dyn Device>) -> Box<dyn Device> + Send + Sync;

/// Wraps the device of every file that is opened through it; the default changes nothing.
///
/// What reads weights takes one, so that tests can delay and fail every single read of a run.
#[derive(Clone, Default)]
pub struct Interpose(Option<Arc<Wrap>>);

impl Interpose {
    /// Wrap devices, each given with its file's path.
    pub fn with(
        wrap: impl Fn(&Path, Box<dyn Device>) -> Box<dyn Device> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(wrap)))
    }

    /// The same file, behind what was put before it.
    #[must_use]
    pub fn apply(&self, mut file: DirectFile) -> DirectFile {
        if let Some(wrap) = &self.0 {
            file.device = wrap(&file.path, file.device);
        }
        file
    }
}

impl fmt::Debug for Interpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            None => "Interpose(nothing)",
            Some(_) => "Interpose(..)",
        })
    }
}
