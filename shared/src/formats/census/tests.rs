use super::*;

#[test]
fn the_census_of_the_release_is_the_published_one() {
    let census = Census::of_release();
    let published = [
        (
            TensorClass::RoutedExperts,
            494_592,
            2_722_740_830_208,
            1_446_456_066_048,
        ),
        (
            TensorClass::SharedExperts,
            276,
            12_155_092_992,
            24_310_185_984,
        ),
        (
            TensorClass::KdaAttention,
            966,
            30_618_088_704,
            61_258_257_408,
        ),
        (
            TensorClass::MlaAttention,
            192,
            5_572_706_304,
            11_145_412_608,
        ),
        (TensorClass::Router, 184, 590_955_008, 1_182_074_880),
        (
            TensorClass::LatentProjections,
            276,
            4_727_310_336,
            9_454_620_672,
        ),
        (TensorClass::DenseMlp, 3, 726_663_168, 1_453_326_336),
        (TensorClass::Norms, 186, 1_333_248, 2_666_496),
        (TensorClass::AttentionResiduals, 372, 2_666_496, 5_332_992),
        (TensorClass::Embedding, 1, 1_174_405_120, 2_348_810_240),
        (TensorClass::OutputHead, 1, 1_174_405_120, 2_348_810_240),
        (TensorClass::Final, 3, 21_504, 43_008),
        (TensorClass::Vision, 168, 447_358_976, 894_717_952),
    ];
    for (class, tensors, params, bytes) in published {
        let want = ClassTotals {
            tensors,
            params,
            bytes,
        };
        assert_eq!(census.classes.get(class), want, "{class:?}");
    }
    assert_eq!(census.classes.iter().count(), published.len());
    assert_eq!(census.num_tensors, 497_220);
    assert_eq!(census.total_params, 2_779_931_837_184);
    assert_eq!(census.total_bytes, 1_560_860_324_864);
    assert_eq!(census.total_file_bytes, 1_560_936_091_448);
    assert_eq!(
        (census.expert_bytes, census.num_experts_total),
        (17_547_264, 82_432)
    );
}

#[test]
fn the_headers_of_the_release_are_as_long_as_published() {
    let census = Census::of_release();
    let shard = |number: usize| {
        let shard = &census.shards[number - 1];
        (shard.tensors, shard.header_bytes)
    };
    assert_eq!(shard(1), (23, 2_928));
    assert_eq!(shard(2), (5_404, 818_704));
    assert_eq!(shard(4), (5_398, 817_616));
    assert_eq!(shard(11), (5_404, 824_112));
    assert_eq!(shard(93), (5_398, 823_016));
    assert_eq!(shard(94), (5, 584));
    assert_eq!(shard(95), (3, 304));
    assert_eq!(shard(96), (165, 19_424));
    let trunk: u64 = census.layers.iter().map(|l| l.trunk_bytes).sum();
    assert_eq!(trunk, 108_811_877_376);
    assert_eq!(census.layers[1].trunk_offset, 818_704);
}

#[test]
fn a_census_reads_back() {
    let census = Census::of_release();
    let text = serde_json::to_vec(&census).unwrap();
    assert_eq!(Census::parse(&text, Path::new("c.json")).unwrap(), census);
}

#[test]
fn another_schema_is_refused_by_name() {
    let error = Census::parse(br#"{"schema":"k3.plan/1"}"#, Path::new("c.json")).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("k3.plan/1") && text.contains("c.json"),
        "{text}"
    );
}

#[test]
fn a_problem_reads_file_tensor_offset_message() {
    let problem = Problem::in_tensor("a.safetensors", "t", Some(8), "is bad");
    assert_eq!(problem.to_string(), "a.safetensors: t at byte 8: is bad");
}
