//! Published facts of the Kimi K3 release, embedded from `manifests/`.

/// The release's `config.json`, verbatim.
pub const CONFIG_JSON: &str = include_str!("../../manifests/kimi-k3.config.json");

const SHARD_SIZES: &str = include_str!("../../manifests/kimi-k3.shard_sizes.txt");

/// Name of the built-in manifest on command lines.
pub const NAME: &str = "kimi-k3";

/// File name and published size in bytes of each of the 96 shards, in order.
pub fn shard_sizes() -> Vec<(&'static str, u64)> {
    SHARD_SIZES
        .lines()
        .filter_map(|line| {
            let (name, size) = line.split_once(' ')?;
            Some((name, size.trim().parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn the_published_sizes_sum_to_the_published_total() {
        let sizes = shard_sizes();
        assert_eq!(sizes.len(), 96);
        assert_eq!(sizes.iter().map(|s| s.1).sum::<u64>(), 1_560_936_091_448);
    }

    #[test]
    fn the_released_config_is_accepted() {
        let config = Config::parse(CONFIG_JSON.as_bytes(), "config.json".as_ref()).unwrap();
        assert_eq!(config.num_hidden_layers, 93);
    }

    #[test]
    fn row_06_the_mla_layers_of_the_release_are_3_7_to_87_91_and_92() {
        let config = Config::parse(CONFIG_JSON.as_bytes(), "config.json".as_ref()).unwrap();
        let mla: Vec<usize> = (0..93)
            .filter(|&l| config.mixers[l] == crate::config::Mixer::Mla)
            .collect();
        let want: Vec<usize> = (3..92).step_by(4).chain([92]).collect();
        assert_eq!(mla, want);
    }
}
