//! Looking fields up in the nested and the flat form, and collecting every problem on the way.

use serde_json::{Map, Value};

use super::Mixer;

/// No dimension of a real model comes near this; products of three stay far inside a u64.
const MAX_DIMENSION: u64 = 1 << 20;
/// Layers are listed one by one, so a wild count must not be believed.
const MAX_LAYERS: u64 = 4096;

/// The objects of a `config.json` in which a field may stand, and the problems met so far.
pub(super) struct Fields<'a> {
    root: &'a Map<String, Value>,
    text: Option<&'a Map<String, Value>>,
    linear: Option<&'a Map<String, Value>>,
    pub(super) problems: Vec<String>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(root: &'a Value) -> Self {
        static EMPTY: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);
        let mut problems = Vec::new();
        let root = root.as_object().unwrap_or(&EMPTY);
        // Some exporters wrap the whole file in one "config" member.
        let root = match root.get("config").and_then(Value::as_object) {
            Some(inner)
                if !root.contains_key("text_config") && !root.contains_key("hidden_size") =>
            {
                inner
            }
            _ => root,
        };
        let mut object = |parent: &'a Map<String, Value>, name: &str| match parent.get(name) {
            None => None,
            Some(Value::Object(map)) => Some(map),
            Some(_) => {
                problems.push(format!("{name}: not an object"));
                None
            }
        };
        let text = object(root, "text_config");
        let linear = object(text.unwrap_or(root), "linear_attn_config");
        if text.is_some() && linear.is_none() {
            problems.push("text_config.linear_attn_config: missing".into());
        }
        Self {
            root,
            text,
            linear,
            problems,
        }
    }

    pub(super) fn problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    fn nested(&self) -> bool {
        self.text.is_some()
    }

    /// The value of a field, from the first object that has it; the same field with another value elsewhere is a problem.
    fn find(&mut self, places: &[(Option<&'a Map<String, Value>>, &str)]) -> Option<&'a Value> {
        let mut found: Option<(&str, &'a Value)> = None;
        for &(object, name) in places {
            let Some(value) = object.and_then(|o| o.get(name)) else {
                continue;
            };
            match found {
                None => found = Some((name, value)),
                Some((first, other)) if other != value => {
                    self.problems.push(format!(
                        "{first} = {other} here but {name} = {value} in another place of the file"
                    ));
                }
                Some(_) => {}
            }
        }
        found.map(|(_, value)| value)
    }

    /// A field of the text model: in `text_config`, else at the root, by its name or an alias.
    fn text_field(&mut self, name: &str) -> Option<&'a Value> {
        let alias = match name {
            "activation_situ_beta" => "situ_beta",
            "activation_situ_linear_beta" => "situ_linear_beta",
            "num_experts_per_token" => "num_experts_per_tok",
            other => other,
        };
        let (text, root) = (self.text, Some(self.root));
        self.find(&[(text, name), (text, alias), (root, name), (root, alias)])
    }

    /// A field of `linear_attn_config`; by its alias, or by its own name where the name is not `MLA`'s too, outside it.
    fn linear_field(&mut self, name: &str, alias: &str) -> Option<&'a Value> {
        let (linear, text, root) = (self.linear, self.text, Some(self.root));
        self.find(&[(linear, name), (text, alias), (root, alias)])
    }

    fn missing<T>(&mut self, name: &str) -> Option<T> {
        self.problems.push(format!("{name}: missing"));
        None
    }

    fn integer(
        &mut self,
        name: &str,
        value: &Value,
        range: std::ops::RangeInclusive<u64>,
    ) -> Option<usize> {
        match value.as_u64() {
            Some(n) if range.contains(&n) => usize::try_from(n).ok(),
            Some(n) => {
                self.problems.push(format!(
                    "{name}: {n} is outside {}..={}",
                    range.start(),
                    range.end()
                ));
                None
            }
            None => {
                self.problems
                    .push(format!("{name}: {value} is not a whole number"));
                None
            }
        }
    }

    fn number(&mut self, name: &str, value: &Value) -> Option<f64> {
        match value.as_f64() {
            Some(x) if x.is_finite() => Some(x),
            _ => {
                self.problems
                    .push(format!("{name}: {value} is not a finite number"));
                None
            }
        }
    }

    /// A required dimension, at least one.
    pub(super) fn size(&mut self, name: &str) -> Option<usize> {
        let max = if name == "num_hidden_layers" {
            MAX_LAYERS
        } else {
            MAX_DIMENSION
        };
        match self.text_field(name) {
            None => self.missing(name),
            Some(value) => self.integer(name, value, 1..=max),
        }
    }

    /// A required count that may be zero.
    pub(super) fn count(&mut self, name: &str) -> Option<usize> {
        match self.text_field(name) {
            None => self.missing(name),
            Some(value) => self.integer(name, value, 0..=MAX_DIMENSION),
        }
    }

    /// A count that the model does not depend on.
    pub(super) fn optional_count(&mut self, name: &str) -> Option<usize> {
        let value = self.text_field(name).filter(|v| !v.is_null())?;
        self.integer(name, value, 1..=u64::from(u32::MAX))
    }

    /// An optional token id.
    pub(super) fn token(&mut self, name: &str) -> Option<u32> {
        let value = self.text_field(name).filter(|v| !v.is_null())?;
        self.integer(name, value, 0..=u64::from(u32::MAX))
            .and_then(|id| u32::try_from(id).ok())
    }

    /// A required number above zero.
    pub(super) fn positive(&mut self, name: &str) -> Option<f64> {
        let Some(value) = self.text_field(name) else {
            return self.missing(name);
        };
        let x = self.number(name, value)?;
        if x <= 0.0 {
            self.problems.push(format!("{name}: {x} is not above zero"));
            return None;
        }
        Some(x)
    }

    /// A required width that MXFP4 groups of 32 must divide.
    pub(super) fn group_size_multiple(&mut self, name: &str) -> Option<usize> {
        let size = self.size(name)?;
        if size % 32 != 0 {
            self.problems.push(format!(
                "{name}: {size} is not a multiple of the MXFP4 group of 32"
            ));
            return None;
        }
        Some(size)
    }

    /// A required dimension of `linear_attn_config`, at least one.
    pub(super) fn linear_attn_size(&mut self, name: &str, alias: &str) -> Option<usize> {
        let shown = if self.linear.is_some() {
            format!("linear_attn_config.{name}")
        } else {
            alias.to_owned()
        };
        match self.linear_field(name, alias) {
            None => self.missing(&shown),
            Some(value) => self.integer(&shown, value, 1..=MAX_DIMENSION),
        }
    }

    /// The required lower bound of the log decay, below zero.
    pub(super) fn gate_lower_bound(&mut self) -> Option<f64> {
        let name = "gate_lower_bound";
        let Some(value) = self.linear_field(name, name) else {
            return self.missing(name);
        };
        let x = self.number(name, value)?;
        if x >= 0.0 {
            self.problems.push(format!("{name}: {x} is not below zero"));
            return None;
        }
        Some(x)
    }

    /// `num_key_value_heads`, which must equal the heads.
    pub(super) fn check_key_value_heads(&mut self, num_heads: Option<usize>) {
        let name = "num_key_value_heads";
        match self.text_field(name) {
            None if self.nested() => self.problems.push(format!("{name}: missing")),
            None => {}
            Some(value) => {
                let heads = self.integer(name, value, 1..=MAX_DIMENSION);
                if let (Some(kv), Some(heads)) = (heads, num_heads)
                    && kv != heads
                {
                    self.problems
                        .push(format!("{name}: {kv} is not num_attention_heads = {heads}"));
                }
            }
        }
    }

    /// The mixer of each layer from the one-based lists, which must partition `1..=num_hidden_layers`.
    pub(super) fn mixers(&mut self, num_hidden_layers: Option<usize>) -> Option<Vec<Mixer>> {
        let full = self.layer_list("full_attn_layers", true);
        let kda = self.layer_list("kda_layers", self.nested());
        let layers = num_hidden_layers?;
        let full = full?;
        let before = self.problems.len();
        let in_range = |list: &[usize]| list.iter().copied().find(|&l| l == 0 || l > layers);
        for (name, list) in [
            ("full_attn_layers", Some(&full)),
            ("kda_layers", kda.as_ref()),
        ] {
            if let Some(bad) = list.and_then(|l| in_range(l)) {
                self.problems.push(format!(
                    "{name}: {bad} is outside 1..={layers} (layers are counted from one)"
                ));
            }
        }
        if self.problems.len() > before {
            return None;
        }
        if full.is_empty() || full.len() >= layers {
            self.problems.push(format!(
                "full_attn_layers: {} of {layers} layers; the model mixes both kinds",
                full.len()
            ));
        }
        let mut mixers = vec![None; layers];
        let listed = [
            (Mixer::Mla, "full_attn_layers", Some(&full)),
            (Mixer::Kda, "kda_layers", kda.as_ref()),
        ];
        for (mixer, name, list) in listed {
            for &layer in list.into_iter().flatten() {
                if let Some(place) = mixers.get_mut(layer - 1) {
                    if place.is_some() {
                        self.problems.push(format!(
                            "{name}: layer {layer} (counted from one) is listed twice"
                        ));
                    }
                    *place = Some(mixer);
                }
            }
        }
        if kda.is_some() {
            let unlisted = mixers.iter().position(Option::is_none);
            if let Some(layer) = unlisted {
                self.problems.push(format!(
                    "kda_layers: layer {} (counted from one) is in neither list",
                    layer + 1
                ));
            }
        }
        Some(
            mixers
                .into_iter()
                .map(|m| m.unwrap_or(Mixer::Kda))
                .collect(),
        )
    }

    fn layer_list(&mut self, name: &str, required: bool) -> Option<Vec<usize>> {
        let Some(value) = self.linear_field(name, name) else {
            if required {
                self.problems.push(format!("{name}: missing"));
            }
            return None;
        };
        let Some(list) = value.as_array() else {
            self.problems.push(format!("{name}: not a list"));
            return None;
        };
        let before = self.problems.len();
        let layers = list
            .iter()
            .filter_map(|v| self.integer(name, v, 0..=u64::from(u32::MAX)))
            .collect();
        (self.problems.len() == before).then_some(layers)
    }

    /// Fields that have one legal value: anything else is another model.
    pub(super) fn check_fixed(&mut self) {
        let required = [
            ("hidden_act", Value::from("situ")),
            ("tie_word_embeddings", Value::from(false)),
            ("moe_router_activation_func", Value::from("sigmoid")),
            ("mla_use_nope", Value::from(true)),
            ("mla_use_output_gate", Value::from(true)),
            ("latent_moe_use_norm", Value::from(true)),
            ("moe_renormalize", Value::from(true)),
        ];
        // Written by every known exporter of either form; the others are absent from flat files.
        let in_flat_files = [
            "mla_use_output_gate",
            "latent_moe_use_norm",
            "moe_renormalize",
            "tie_word_embeddings",
        ];
        for (name, want) in required {
            let needed = self.nested() || in_flat_files.contains(&name);
            let value = self.text_field(name);
            self.must_be(name, value, &want, needed);
        }
        for (name, want) in [
            ("num_expert_group", 1),
            ("topk_group", 1),
            ("moe_layer_freq", 1),
            ("num_nextn_predict_layers", 0),
        ] {
            let value = self.text_field(name);
            self.must_be(name, value, &Value::from(want), false);
        }
        let gate = self.linear_field("use_full_rank_gate", "use_full_rank_gate");
        self.must_be(
            "use_full_rank_gate",
            gate,
            &Value::from(true),
            self.nested(),
        );
        self.check_quantization();
    }

    fn must_be(&mut self, name: &str, value: Option<&Value>, want: &Value, required: bool) {
        match value {
            None if required => self
                .problems
                .push(format!("{name}: missing (must be {want})")),
            Some(value) if value != want => self
                .problems
                .push(format!("{name}: {value} instead of {want}")),
            _ => {}
        }
    }

    fn check_quantization(&mut self) {
        let Some(quantization) = self.text_field("quantization_config") else {
            if self.nested() {
                self.problems.push("quantization_config: missing".into());
            }
            return;
        };
        let format = quantization.get("format");
        self.must_be(
            "quantization_config.format",
            format,
            &Value::from("mxfp4-pack-quantized"),
            true,
        );
        let groups = quantization.get("config_groups").and_then(Value::as_object);
        let Some(groups) = groups.filter(|g| !g.is_empty()) else {
            self.problems
                .push("quantization_config.config_groups: missing".into());
            return;
        };
        for (group, value) in groups {
            for (name, want) in [("num_bits", 4), ("group_size", 32)] {
                let shown = format!("quantization_config.config_groups.{group}.weights.{name}");
                let found = value.get("weights").and_then(|w| w.get(name));
                self.must_be(&shown, found, &Value::from(want), true);
            }
        }
    }
}
