use super::*;
use crate::release;

fn released() -> Value {
    serde_json::from_str(release::CONFIG_JSON).unwrap()
}

fn problems(root: &Value) -> Vec<String> {
    match Config::from_value(root, Path::new("config.json")) {
        Ok(_) => Vec::new(),
        Err(ConfigError::Problems { problems, .. }) => problems,
        Err(other) => panic!("{other}"),
    }
}

fn flat() -> Value {
    let config = Config::from_value(&released(), Path::new("c")).unwrap();
    let canonical = config.to_canonical();
    let mut text = canonical["text_config"].as_object().unwrap().clone();
    let linear = text.remove("linear_attn_config").unwrap();
    for only_nested in [
        "hidden_act",
        "mla_use_nope",
        "moe_layer_freq",
        "moe_router_activation_func",
        "num_expert_group",
        "num_key_value_heads",
        "num_nextn_predict_layers",
        "quantization_config",
        "topk_group",
    ] {
        text.remove(only_nested);
    }
    for (from, to) in [
        ("num_heads", "kda_num_heads"),
        ("head_dim", "kda_head_dim"),
        ("short_conv_kernel_size", "short_conv_kernel_size"),
        ("gate_lower_bound", "gate_lower_bound"),
        ("full_attn_layers", "full_attn_layers"),
    ] {
        text.insert(to.into(), linear[from].clone());
    }
    for (from, to) in [
        ("activation_situ_beta", "situ_beta"),
        ("activation_situ_linear_beta", "situ_linear_beta"),
    ] {
        let value = text.remove(from).unwrap();
        text.insert(to.into(), value);
    }
    Value::Object(text)
}

#[test]
fn the_canonical_form_reads_back_and_is_stable() {
    let config = Config::from_value(&released(), Path::new("c")).unwrap();
    let canonical = config.to_canonical();
    assert_eq!(
        Config::from_value(&canonical, Path::new("c")).unwrap(),
        config
    );
    assert_eq!(canonical.to_string(), config.to_canonical().to_string());
}

#[test]
fn nested_and_flat_files_mean_the_same() {
    assert_eq!(
        Config::from_value(&flat(), Path::new("c")).unwrap(),
        Config::from_value(&released(), Path::new("c")).unwrap()
    );
}

#[test]
fn every_required_field_is_missed_by_name() {
    let canonical = Config::from_value(&released(), Path::new("c"))
        .unwrap()
        .to_canonical();
    let optional = [
        "eos_token_id",
        "max_position_embeddings",
        "moe_layer_freq",
        "num_expert_group",
        "num_nextn_predict_layers",
        "topk_group",
    ];
    for name in canonical["text_config"].as_object().unwrap().keys() {
        let mut without = canonical.clone();
        without["text_config"].as_object_mut().unwrap().remove(name);
        let found = problems(&without);
        assert_eq!(
            !found.is_empty(),
            !optional.contains(&name.as_str()),
            "{name}: {found:?}"
        );
        assert!(
            found.is_empty() || found.iter().any(|p| p.contains(name.as_str())),
            "{name}: {found:?}"
        );
    }
    for name in canonical["text_config"]["linear_attn_config"]
        .as_object()
        .unwrap()
        .keys()
    {
        let mut without = canonical.clone();
        without["text_config"]["linear_attn_config"]
            .as_object_mut()
            .unwrap()
            .remove(name);
        assert!(
            problems(&without).iter().any(|p| p.contains(name.as_str())),
            "{name}"
        );
    }
}

#[test]
fn all_problems_come_in_one_message() {
    let mut root = released();
    root["text_config"]["hidden_size"] = json!(7168.0);
    root["text_config"]["num_experts_per_token"] = json!(897);
    root["text_config"]["hidden_act"] = json!("silu");
    root["text_config"]
        .as_object_mut()
        .unwrap()
        .remove("q_lora_rank");
    let found = problems(&root);
    for name in [
        "hidden_size",
        "num_experts_per_token",
        "hidden_act",
        "q_lora_rank",
    ] {
        assert!(found.iter().any(|p| p.contains(name)), "{name}: {found:?}");
    }
}

#[test]
fn row_06_layer_lists_are_one_based_and_partition_the_layers() {
    let set = |name: &str, value: Value| {
        let mut root = released();
        root["text_config"]["linear_attn_config"][name] = value;
        problems(&root)
    };
    let full: Vec<u64> = serde_json::from_value(
        released()["text_config"]["linear_attn_config"]["full_attn_layers"].clone(),
    )
    .unwrap();
    let zero_based: Vec<u64> = full.iter().map(|l| l - 1).collect();
    assert!(!set("full_attn_layers", json!(zero_based)).is_empty());
    assert!(!set("full_attn_layers", json!([])).is_empty());
    assert!(!set("full_attn_layers", json!([0, 4])).is_empty());
    assert!(!set("full_attn_layers", json!([94])).is_empty());
    let mut twice = full.clone();
    twice.push(93);
    assert!(!set("full_attn_layers", json!(twice)).is_empty());
    assert!(!set("kda_layers", json!([1, 2, 3])).is_empty());
    let mut flat = flat();
    flat["full_attn_layers"] = json!([]);
    assert!(!problems(&flat).is_empty());
    flat["full_attn_layers"] = json!((1..=93).collect::<Vec<u32>>());
    assert!(!problems(&flat).is_empty());
}

#[test]
fn what_only_the_nested_form_carries_is_checked_in_the_flat_form_when_present() {
    for (name, value) in [
        ("kda_layers", json!([1])),
        ("use_full_rank_gate", json!(false)),
        ("mla_use_nope", json!(false)),
        ("hidden_act", json!("silu")),
        ("quantization_config", json!({"format": "int4"})),
        ("num_key_value_heads", json!(8)),
    ] {
        let mut root = flat();
        root[name] = value;
        assert!(problems(&root).iter().any(|p| p.contains(name)), "{name}");
    }
}

#[test]
fn the_same_field_with_two_values_is_a_contradiction() {
    let mut root = released();
    root["text_config"]["num_experts_per_tok"] = json!(8);
    assert!(
        problems(&root)
            .iter()
            .any(|p| p.contains("num_experts_per_tok"))
    );
}

#[test]
fn other_models_are_refused() {
    for (name, value) in [
        ("num_nextn_predict_layers", json!(1)),
        ("num_expert_group", json!(8)),
        ("moe_layer_freq", json!(2)),
        ("tie_word_embeddings", json!(true)),
        ("moe_router_activation_func", json!("softmax")),
        ("activation_situ_beta", json!(0)),
        ("rms_norm_eps", json!(-1e-5)),
        ("moe_intermediate_size", json!(3073)),
        ("num_hidden_layers", json!(0)),
        ("first_k_dense_replace", json!(94)),
        ("vocab_size", json!(-1)),
        ("hidden_size", json!("7168")),
        ("hidden_size", json!(null)),
    ] {
        let mut root = released();
        root["text_config"][name] = value.clone();
        assert!(
            problems(&root).iter().any(|p| p.contains(name)),
            "{name} = {value}"
        );
    }
}

#[test]
fn the_first_layers_are_a_model_of_their_own() {
    let config = Config::from_value(&released(), Path::new("c")).unwrap();
    let five = config.first_layers(5);
    assert_eq!((five.num_hidden_layers, five.mixers.len()), (5, 5));
    assert_eq!(config.first_layers(1000), config);
}
