//! Common parts of all plots: the document, colours, text and round numbers.

/// Colours that are distinguishable with any colour vision (Okabe and Ito).
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333", "#999999"];

/// The colour of the series with this number.
pub(super) fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

/// The start of a document, with a white background.
pub(super) fn begin(title: &str, width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height:.0}\" width=\"{width}\" height=\"{height:.0}\" \
         font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#222222\">\n\
         <title>{}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        escape(title)
    )
}

/// The smallest value of 1, 2 or 5 times a power of ten that is at least `step`. Uses multiplication only, since logarithms differ between
/// machines.
pub(super) fn nice(step: f64) -> f64 {
    if !(step > 1e-300 && step < 1e300) {
        return 1.0;
    }
    let mut power = 1.0;
    while power > step {
        power /= 10.0;
    }
    while power * 10.0 <= step {
        power *= 10.0;
    }
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|value| *value >= step * 0.999_999).unwrap_or(step)
}

/// Formats a number with the decimal places that the step needs.
pub(super) fn number(value: f64, step: f64) -> String {
    let mut scaled = step.abs();
    let mut places = 0;
    while places < 9 && (scaled - scaled.round()).abs() > 1e-6 * scaled {
        scaled *= 10.0;
        places += 1;
    }
    let text = format!("{value:.places$}");
    if text.trim_start_matches(['-', '0', '.']).is_empty() { "0".to_owned() } else { text }
}

/// Escapes text for a document.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_at_any_scale() {
        assert_eq!([0.13, 1.0, 1.1, 3.0, 9.0, 4200.0].map(nice), [0.2, 1.0, 2.0, 5.0, 10.0, 5000.0]);
        assert_eq!([f64::NAN, 0.0, f64::INFINITY].map(nice), [1.0; 3]);
        assert_eq!([number(2.5, 0.5), number(2.0, 1.0), number(-0.0, 0.1), number(0.25, 0.05)], ["2.5", "2", "0", "0.25"]);
    }
}
