//! Fixture trees of other machines.

use super::*;

const GIB: u64 = 1 << 30;

/// A machine made of files.
struct Tree(tempfile::TempDir);

impl Tree {
    /// 64 GiB available, processors 0-7 allowed, four cores of two threads each.
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        tree.file(
            "proc/meminfo",
            "MemTotal:       134217728 kB\nMemFree: 1 kB\nMemAvailable:   67108864 kB\n",
        );
        tree.file("proc/self/status", "Name:\tk3\nCpus_allowed_list:\t0-7\n");
        for cpu in 0..8 {
            tree.file(
                &format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"),
                &format!("{},{}\n", cpu % 4, cpu % 4 + 4),
            );
        }
        tree
    }

    fn v2(cgroup: &str, mount_root: &str) -> Self {
        let tree = Self::new();
        tree.file("proc/self/cgroup", &format!("0::{cgroup}\n"));
        tree.file(
            "proc/self/mountinfo",
            &format!(
                "25 1 8:1 / / rw - ext4 /dev/sda rw\n\
                 30 25 0:26 {mount_root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
            ),
        );
        tree
    }

    fn file(&self, path: &str, text: &str) -> &Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn group(&self, folder: &str, files: &[(&str, String)]) -> &Self {
        for (name, text) in files {
            self.file(
                &format!("sys/fs/cgroup/{folder}/{name}"),
                &format!("{text}\n"),
            );
        }
        self
    }

    fn host(&self) -> Host {
        Host::detect_at(self.0.path()).unwrap()
    }
}

fn text(bytes: u64) -> String {
    bytes.to_string()
}

#[test]
fn a_machine_without_groups_is_limited_by_what_is_available() {
    let host = Tree::new().host();
    assert_eq!(host.available_bytes, 64 * GIB);
    assert_eq!(host.limit_bytes, 64 * GIB);
    assert_eq!(host.limited_by, "MemAvailable");
    assert_eq!(host.cores, 4);
}

#[test]
fn the_word_max_is_no_limit() {
    let tree = Tree::v2("/user.slice/run.scope", "/");
    tree.group(
        "user.slice/run.scope",
        &[
            ("memory.max", "max".into()),
            ("memory.high", "max".into()),
            ("cpu.max", "max 100000".into()),
        ],
    );
    let host = tree.host();
    assert_eq!((host.limit_bytes, host.cores), (64 * GIB, 4));
    assert_eq!(host.limited_by, "MemAvailable");
}

#[test]
fn the_tightest_ancestor_counts_less_what_cannot_be_reclaimed() {
    let tree = Tree::v2("/a/b/c", "/");
    tree.group("a/b/c", &[("memory.max", text(32 * GIB))]);
    tree.group(
        "a/b",
        &[
            ("memory.max", text(16 * GIB)),
            ("memory.current", text(12 * GIB)),
            (
                "memory.stat",
                format!(
                    "anon {}\ninactive_file {}\nactive_file {}",
                    2 * GIB,
                    7 * GIB,
                    3 * GIB
                ),
            ),
        ],
    );
    tree.group("a", &[("memory.max", text(24 * GIB))]);
    let host = tree.host();
    assert_eq!(host.limit_bytes, 14 * GIB);
    assert_eq!(host.limited_by, "/sys/fs/cgroup/a/b/memory.max");
}

#[test]
fn memory_high_limits_like_memory_max() {
    let tree = Tree::v2("/a", "/");
    tree.group(
        "a",
        &[
            ("memory.max", text(16 * GIB)),
            ("memory.high", text(9 * GIB)),
        ],
    );
    assert_eq!(tree.host().limited_by, "/sys/fs/cgroup/a/memory.high");
}

#[test]
fn a_private_namespace_shows_its_limit_at_the_mount_point() {
    let tree = Tree::v2("/", "/");
    tree.group(
        "",
        &[
            ("memory.max", text(8 * GIB)),
            ("cpu.max", "250000 100000".into()),
        ],
    );
    let host = tree.host();
    assert_eq!((host.limit_bytes, host.cores), (8 * GIB, 2));
}

#[test]
fn a_host_namespace_with_only_the_own_group_mounted_is_understood() {
    let tree = Tree::v2("/docker/abc/inner", "/docker/abc");
    tree.group("inner", &[("memory.max", text(6 * GIB))]);
    tree.group("", &[("memory.max", text(8 * GIB))]);
    assert_eq!(tree.host().limit_bytes, 6 * GIB);
}

#[test]
fn a_path_that_does_not_meet_the_mount_falls_back_to_the_mount_point() {
    for (cgroup, root) in [
        ("/docker/abc", "/other"),
        ("/../sibling", "/"),
        ("/x", "/../.."),
    ] {
        let tree = Tree::v2(cgroup, root);
        tree.group("", &[("memory.max", text(8 * GIB))]);
        assert_eq!(tree.host().limit_bytes, 8 * GIB, "{cgroup} {root}");
    }
}

fn v1(cgroup: &str, mount_root: &str) -> Tree {
    let tree = Tree::new();
    tree.file(
        "proc/self/cgroup",
        &format!("9:name=systemd:/\n4:memory:{cgroup}\n2:cpu,cpuacct:{cgroup}\n0::/\n"),
    );
    let mount = |id: u32, name: &str, kind: &str| {
        format!("{id} 31 0:{id} {mount_root} /sys/fs/cgroup/{name} rw - {kind} {kind} rw,{name}\n")
    };
    tree.file(
        "proc/self/mountinfo",
        &[
            mount(32, "memory", "cgroup"),
            mount(33, "cpu,cpuacct", "cgroup"),
            mount(34, "unified", "cgroup2"),
        ]
        .concat(),
    );
    tree
}

#[test]
fn version_one_and_hybrid_limits_are_read() {
    let tree = v1("/docker/abc", "/");
    tree.group(
        "memory/docker/abc",
        &[
            ("memory.limit_in_bytes", text(10 * GIB)),
            ("memory.usage_in_bytes", text(5 * GIB)),
            (
                "memory.stat",
                format!("cache 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"),
            ),
        ],
    );
    tree.group(
        "cpu,cpuacct/docker",
        &[
            ("cpu.cfs_quota_us", "399999".into()),
            ("cpu.cfs_period_us", "100000".into()),
        ],
    );
    tree.group("unified", &[("cgroup.procs", "1".into())]);
    let host = tree.host();
    assert_eq!((host.limit_bytes, host.cores), (7 * GIB, 3));
    assert_eq!(
        host.limited_by,
        "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes"
    );
}

#[test]
fn a_version_one_limit_above_the_mount_shows_in_the_statistics() {
    let tree = v1("/docker/abc", "/docker/abc");
    tree.group(
        "memory",
        &[
            ("memory.limit_in_bytes", "9223372036854771712".into()),
            (
                "memory.stat",
                format!("hierarchical_memory_limit {}", 3 * GIB),
            ),
        ],
    );
    let host = tree.host();
    assert_eq!(host.limit_bytes, 3 * GIB);
    assert!(
        host.limited_by.contains("hierarchical"),
        "{}",
        host.limited_by
    );
}

#[test]
fn unlimited_version_one_groups_do_not_limit() {
    let tree = v1("/", "/");
    tree.group(
        "memory",
        &[("memory.limit_in_bytes", "9223372036854771712".into())],
    );
    tree.group(
        "cpu,cpuacct",
        &[
            ("cpu.cfs_quota_us", "-1".into()),
            ("cpu.cfs_period_us", "100000".into()),
        ],
    );
    let host = tree.host();
    assert_eq!((host.limit_bytes, host.cores), (64 * GIB, 4));
}

#[test]
fn a_quota_below_one_processor_still_leaves_one() {
    let tree = Tree::v2("/", "/");
    tree.group("", &[("cpu.max", "5000 100000".into())]);
    assert_eq!(tree.host().cores, 1);
}

#[test]
fn the_affinity_mask_limits_and_siblings_count_once() {
    let tree = Tree::new();
    tree.file("proc/self/status", "Cpus_allowed_list:\t1,5-6\n");
    assert_eq!(tree.host().cores, 2);
    for cpu in 0..8 {
        let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        fs::remove_file(tree.0.path().join(path)).unwrap();
    }
    assert_eq!(
        tree.host().cores,
        3,
        "unknown siblings are cores of their own"
    );
}

#[test]
fn a_missing_field_is_named() {
    let tree = Tree::new();
    tree.file("proc/meminfo", "MemTotal: 1 kB\n");
    let error = Host::detect_at(tree.0.path()).unwrap_err().to_string();
    assert!(
        error.contains("MemAvailable") && error.contains("meminfo"),
        "{error}"
    );
}

#[test]
fn this_machine_is_detected() {
    let host = Host::detect().unwrap();
    assert!(host.cores >= 1);
    assert!(host.limit_bytes > 0 && host.limit_bytes <= host.available_bytes);
}

#[test]
fn the_peak_follows_what_is_backed_with_memory_and_can_be_reset() {
    const BYTES: usize = 64 << 20;
    let mut zeros = vec![0.0f32; BYTES / 4];
    let before = rss_bytes().unwrap();
    back_with_memory(&mut zeros);
    assert!(rss_bytes().unwrap() >= before + BYTES as u64 * 3 / 4);
    assert!(zeros.iter().all(|zero| zero.to_bits() == 0));
    drop(zeros);
    let block = std::hint::black_box(vec![1u8; BYTES]);
    assert!(peak_rss_bytes().unwrap() >= BYTES as u64);
    assert!(rss_bytes().unwrap() >= BYTES as u64);
    drop(block);
    let before = peak_rss_bytes().unwrap();
    reset_peak_rss().unwrap();
    assert!(peak_rss_bytes().unwrap() + BYTES as u64 / 2 <= before);
}
