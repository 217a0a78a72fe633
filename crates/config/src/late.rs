//! Reads `late`: whether packets wait in a queue until a link can take them.

use braid_decide::late::{LateBinding, MAX_BELOW};
use braid_model::Rate;

use super::reader::Value;

/// Reads `late`: false, true, or a section with `below` and `up_to`.
pub(super) fn late(value: &Value<'_>) -> Option<LateBinding> {
    if !value.is_table() {
        return value.flag()?.then(LateBinding::default);
    }
    let mut section = value.section("[late]")?;
    let mut late = LateBinding::default();
    if let Some(below) = section.take("below").and_then(|value| value.whole(1..=u64::from(MAX_BELOW))) {
        late.below = below as u32;
    }
    if let Some(value) = section.take("up_to") {
        let rate: Option<Rate> = value.quantity("a rate such as \"300 Mbit/s\"");
        late.up_to = rate.unwrap_or(late.up_to);
        if rate == Some(Rate::ZERO) {
            value.refuse::<()>("up_to is zero, so that packets never wait".to_owned(), "write late = false to turn it off".into());
        }
    }
    section.finish();
    Some(late)
}
