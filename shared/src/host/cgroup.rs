//! The control groups above this process, of both versions: how much memory and processor time they leave it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Component, Path, PathBuf},
};

/// Bytes this process may still come to occupy, and the file that says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) bytes: u64,
    pub(super) limited_by: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// One group: its folder, as this machine sees it, and its path for messages.
#[derive(Clone, Debug)]
struct Group {
    version: Version,
    folder: PathBuf,
    name: PathBuf,
}

/// Every visible group above this process that may limit memory or processor time, the process's own first.
#[derive(Clone, Debug, Default)]
pub(super) struct Groups {
    memory: Vec<Group>,
    cpu: Vec<Group>,
}

/// A mounted hierarchy: the group that is visible at its mount point, and which controllers it has.
struct Mount {
    version: Version,
    root: String,
    point: PathBuf,
    options: Vec<String>,
}

impl Groups {
    /// Find them from `/proc/self/cgroup` and `/proc/self/mountinfo`; a machine without control groups has none.
    pub(super) fn read(root: &Path) -> Self {
        let text = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_default();
        let mounts: Vec<Mount> = text("proc/self/mountinfo")
            .lines()
            .filter_map(Mount::parse)
            .collect();
        let mut groups = Self::default();
        for line in text("proc/self/cgroup").lines() {
            // `hierarchy:controllers:path`; version 2 has no controllers.
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let controllers: Vec<&str> = controllers.split(',').collect();
            if controllers == [""] {
                let chain = chain(root, &mounts, Version::V2, "", path);
                groups.memory.extend(chain.iter().cloned());
                groups.cpu.extend(chain);
            }
            if controllers.contains(&"memory") {
                groups
                    .memory
                    .extend(chain(root, &mounts, Version::V1, "memory", path));
            }
            if controllers.contains(&"cpu") {
                groups
                    .cpu
                    .extend(chain(root, &mounts, Version::V1, "cpu", path));
            }
        }
        groups
    }

    /// The least room any of them leaves; `None` if none sets a limit.
    pub(super) fn memory_room(&self) -> Option<Room> {
        self.memory
            .iter()
            .flat_map(Group::rooms)
            .min_by_key(|room| room.bytes)
    }

    /// Whole processors under the tightest quota, at least one; `None` if none sets one.
    pub(super) fn cpu_quota(&self) -> Option<usize> {
        self.cpu.iter().filter_map(Group::cpu_quota).min()
    }
}

impl Mount {
    /// `36 35 98:0 /root /mount/point options... - type source super-options`.
    fn parse(line: &str) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let version = match right.next()? {
            "cgroup" => Version::V1,
            "cgroup2" => Version::V2,
            _ => return None,
        };
        let options = right.nth(1)?.split(',').map(str::to_owned).collect();
        Some(Self {
            version,
            root: unescape(root),
            point: PathBuf::from(unescape(point)),
            options,
        })
    }
}

/// mountinfo writes blanks and backslashes of paths as `\ooo`.
fn unescape(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        let code = after
            .get(1..4)
            .and_then(|octal| u8::from_str_radix(octal, 8).ok());
        if let Some(byte) = code {
            out.push(char::from(byte));
            rest = after.get(4..).unwrap_or("");
        } else {
            out.push('\\');
            rest = after.get(1..).unwrap_or("");
        }
    }
    out.push_str(rest);
    out
}

/// The process's group in one hierarchy and every group above it down to the mount point.
///
/// The path in `/proc/self/cgroup` counts from the namespace's root, the mount shows the hierarchy from `mount.root` on: below
/// it, the rest of the path leads to the group. Where the two do not meet (a container with the host's cgroup namespace and
/// its own group mounted alone) the mount point is the best that can be seen.
fn chain(
    root: &Path,
    mounts: &[Mount],
    version: Version,
    controller: &str,
    path: &str,
) -> Vec<Group> {
    let serves = |m: &&Mount| {
        m.version == version
            && (version == Version::V2 || m.options.iter().any(|o| o == controller))
    };
    let Some(mount) = mounts.iter().find(serves) else {
        return Vec::new();
    };
    let below = Path::new(path)
        .strip_prefix(&mount.root)
        .ok()
        .filter(|p| p.components().all(|c| matches!(c, Component::Normal(_))))
        .unwrap_or(Path::new(""));
    let mount_folder = root.join(mount.point.strip_prefix("/").unwrap_or(&mount.point));
    below
        .ancestors()
        .map(|part| Group {
            version,
            folder: mount_folder.join(part),
            name: mount.point.join(part),
        })
        .collect()
}

impl Group {
    /// What each limit of this group leaves: the limit less what is occupied and cannot be dropped.
    fn rooms(&self) -> Vec<Room> {
        let limits: &[(&str, Option<u64>)] = match self.version {
            Version::V2 => &[
                ("memory.max", self.number("memory.max")),
                ("memory.high", self.number("memory.high")),
            ],
            Version::V1 => &[
                (
                    "memory.limit_in_bytes",
                    self.number("memory.limit_in_bytes"),
                ),
                (
                    "memory.stat: hierarchical_memory_limit",
                    self.stat().get("hierarchical_memory_limit").copied(),
                ),
            ],
        };
        let occupied = self.occupied();
        limits
            .iter()
            .filter_map(|&(file, limit)| {
                Some(Room {
                    bytes: limit?.saturating_sub(occupied),
                    limited_by: self.name.join(file).display().to_string(),
                })
            })
            .collect()
    }

    /// Bytes charged to the group that stay charged when memory gets tight: all but the page cache.
    fn occupied(&self) -> u64 {
        let (current, caches) = match self.version {
            Version::V2 => ("memory.current", ["inactive_file", "active_file"]),
            Version::V1 => (
                "memory.usage_in_bytes",
                ["total_inactive_file", "total_active_file"],
            ),
        };
        let stat = self.stat();
        let reclaimable: u64 = caches
            .iter()
            .filter_map(|name| stat.get(*name))
            .fold(0, |sum, bytes| sum.saturating_add(*bytes));
        self.number(current)
            .unwrap_or(0)
            .saturating_sub(reclaimable)
    }

    /// Whole processors' worth of time a period, at least one.
    fn cpu_quota(&self) -> Option<usize> {
        let (quota, period): (u64, u64) = match self.version {
            Version::V2 => {
                let text = fs::read_to_string(self.folder.join("cpu.max")).ok()?;
                let mut fields = text.split_whitespace();
                let quota = fields.next()?.parse().ok()?;
                (quota, fields.next()?.parse().ok()?)
            }
            // Without a quota the file says -1, which is no u64.
            Version::V1 => (
                self.number("cpu.cfs_quota_us")?,
                self.number("cpu.cfs_period_us")?,
            ),
        };
        usize::try_from(quota.checked_div(period)?)
            .ok()
            .map(|cores| cores.max(1))
    }

    /// A file of one number; `max`, -1 and a missing file are no number.
    fn number(&self, file: &str) -> Option<u64> {
        fs::read_to_string(self.folder.join(file))
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    fn stat(&self) -> BTreeMap<String, u64> {
        fs::read_to_string(self.folder.join("memory.stat"))
            .unwrap_or_default()
            .lines()
            .filter_map(|line| {
                let (name, value) = line.split_once(' ')?;
                Some((name.to_owned(), value.trim().parse().ok()?))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_in_mount_points_are_read_back() {
        assert_eq!(unescape(r"/mnt/my\040disk"), "/mnt/my disk");
        assert_eq!(unescape(r"/a\134b\"), r"/a\b\");
    }
}
