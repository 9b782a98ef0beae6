//! Prometheus rules for service level objectives: recorded error ratios, and alerts on the rate at
//! which the error budget burns.
//!
//! The alerts follow "Alerting on SLOs" in The Site Reliability Workbook (Google, 2018),
//! <https://sre.google/workbook/alerting-on-slos/>, section 6: multiwindow, multi-burn-rate alerts.

use std::fmt::Write;

use super::{Sli, Slo};
use crate::builtin::Builtin;

/// The windows of the recorded error ratios.
const WINDOWS: [&str; 7] = ["5m", "30m", "1h", "2h", "6h", "1d", "3d"];

/// A condition of an alert: the budget burns faster than `factor` over both windows. At a factor of
/// 1 it lasts for exactly the objective's window. The short window ends the alert soon after the
/// cause.
struct Burn {
    factor: &'static str,
    long: &'static str,
    short: &'static str,
}

const fn burn(factor: &'static str, long: &'static str, short: &'static str) -> Burn {
    Burn { factor, long, short }
}

/// The conditions that need an answer at once, and those that can wait for a working day (Table 5-8
/// of the workbook).
const FAST: [Burn; 2] = [burn("14.4", "1h", "5m"), burn("6", "6h", "30m")];
const SLOW: [Burn; 2] = [burn("3", "1d", "2h"), burn("1", "3d", "6h")];

/// The severity of alerts that need an answer at once.
const URGENT: &str = "critical";

/// Returns a file of Prometheus rules for these objectives.
pub fn rules(slos: &[Slo]) -> String {
    let mut text = String::from(
        "# Recording rules and alerts for the service level objectives of a metrics.yaml; made by `pharos slo rules`.\n\
         # The alerts follow \"Alerting on SLOs\" in The Site Reliability Workbook, section 6:\n\
         # https://sre.google/workbook/alerting-on-slos/\n\
         groups:\n",
    );
    text.push_str("  - name: pharos-slo-errors\n    rules:\n");
    for window in WINDOWS {
        let ratio = error_ratio("rate", "", window);
        let _ = write!(text, "      - record: {}\n        expr: {ratio}\n", recorded(window));
    }
    // The windows are long, so these rules are costly and need no short interval.
    text.push_str("  - name: pharos-slo-budgets\n    interval: 5m\n    rules:\n");
    for slo in slos {
        slo.indicators()
            .for_each(|(sli, _, share)| text.push_str(&budget(slo, sli, share.budget())));
    }
    text.push_str("  - name: pharos-slo-alerts\n    rules:\n");
    for slo in slos {
        for (sli, limit_ns, share) in slo.indicators() {
            let objective = described(slo, sli, limit_ns, share.ratio());
            for severity in [URGENT, "warning"] {
                text.push_str(&alert(slo, sli, share.budget(), &objective, severity));
            }
        }
    }
    text
}

/// Returns the name of the recorded error ratio over a window.
fn recorded(window: &str) -> String {
    format!("model:pharos_slo_errors:ratio_rate{window}")
}

/// Returns the selector of an objective's series.
fn selector(slo: &Slo, sli: Sli) -> String {
    format!("{{slo=\"{}\",sli=\"{}\"}}", slo.name, sli.as_str())
}

/// Returns the share of bad requests over a window, by `rate` or `increase`.
fn error_ratio(function: &str, selector: &str, window: &str) -> String {
    let sum = |metric: Builtin| {
        format!("sum by (slo, sli, model) ({function}({}{selector}[{window}]))", metric.name())
    };
    let good = sum(Builtin::SloGoodRequests);
    let all = sum(Builtin::SloRequests);
    // With --metrics-omit-idle, a model without good requests has no series of them.
    format!("1 - ({good} or 0 * {all}) / {all}")
}

/// Returns the objective's window in days, or in hours.
fn window(slo: &Slo) -> String {
    match slo.window_s % 86_400 {
        0 => format!("{}d", slo.window_s / 86_400),
        _ => format!("{}h", slo.window_s / 3600),
    }
}

/// Returns the rule of the error budget that is left over the objective's window.
fn budget(slo: &Slo, sli: Sli, budget: f64) -> String {
    let ratio = error_ratio("increase", &selector(slo, sli), &window(slo));
    let labels = format!("labels: {{slo: \"{}\", sli: {}}}", slo.name, sli.as_str());
    let record = "record: model:pharos_slo_error_budget_remaining:ratio";
    format!("      - {record}\n        expr: 1 - ({ratio}) / {budget}\n        {labels}\n")
}

/// Describes an objective in one phrase.
fn described(slo: &Slo, sli: Sli, limit_ns: Option<u64>, ratio: f64) -> String {
    let percent = (ratio * 1e9).round() / 1e7;
    let within = limit_ns.map_or_else(String::new, |ns| format!(" within {} ms", ns as f64 / 1e6));
    let what = match sli {
        Sli::Latency | Sli::Availability => format!("of the requests succeed{within}"),
        Sli::FirstToken => format!("of the streams have their first token{within}"),
        Sli::TokenInterval => format!("of the tokens follow the previous one{within}"),
    };
    format!("{percent}% {what}, over {}", window(slo))
}

/// Returns an alert on the error budget of one indicator.
fn alert(slo: &Slo, sli: Sli, budget: f64, objective: &str, severity: &str) -> String {
    let burns = if severity == URGENT { &FAST } else { &SLOW };
    let over = |window: &str, factor: &str| {
        format!("{}{} > {factor} * {budget}", recorded(window), selector(slo, sli))
    };
    let conditions: Vec<String> = burns
        .iter()
        .map(|burn| {
            format!("({} and {})", over(burn.long, burn.factor), over(burn.short, burn.factor))
        })
        .collect();
    let factors: Vec<String> =
        burns.iter().map(|burn| format!("{} times over {}", burn.factor, burn.long)).collect();
    let mut text = String::from("      - alert: PharosSloBudgetBurn\n        expr: |-\n");
    let _ = writeln!(text, "          {}", conditions.join("\n          or "));
    let _ = writeln!(
        text,
        "        labels: {{severity: {severity}, slo: \"{}\", sli: {}}}",
        slo.name,
        sli.as_str()
    );
    text.push_str("        annotations:\n");
    let summary = format!("The error budget of {} ({}) burns too fast", slo.name, sli.as_str());
    let _ = writeln!(text, "          summary: \"{summary} on model {{{{ $labels.model }}}}\"");
    let faster = factors.join(", or ");
    let description = format!("{objective}. The budget burns faster than allowed ({faster}).");
    let counted = match sli {
        Sli::Latency | Sli::Availability => "requests",
        Sli::FirstToken => "streams",
        Sli::TokenInterval => "tokens",
    };
    let errors = format!("{{{{ $value | humanizePercentage }}}} of the {counted} are bad");
    let _ = writeln!(text, "          description: \"Objective: {description} {errors}.\"");
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Catalog;
    use super::*;

    fn of(slos: &str) -> String {
        rules(Catalog::parse(&format!("slos: [{slos}]"), "m.yaml").unwrap().slos())
    }

    #[test]
    fn has_four_burn_rates_for_each_indicator() {
        let text = of("{name: fast, latency: {threshold: 200ms, share: 99%}, availability: \
                       99.9%, window: 28d}");
        assert_eq!(text.matches("- alert: PharosSloBudgetBurn").count(), 4, "{text}");
        assert_eq!(text.matches("- record: model:pharos_slo_errors:ratio_rate").count(), 7);
        assert_eq!(
            text.matches("- record: model:pharos_slo_error_budget_remaining:ratio").count(),
            2
        );
        for expected in [
            "(model:pharos_slo_errors:ratio_rate1h{slo=\"fast\",sli=\"latency\"} > 14.4 * 0.01 \
             and model:pharos_slo_errors:ratio_rate5m{slo=\"fast\",sli=\"latency\"} > 14.4 * 0.01)",
            "or (model:pharos_slo_errors:ratio_rate3d{slo=\"fast\",sli=\"availability\"} > 1 * \
             0.001 and",
            "1 - (1 - (sum by (slo, sli, model) \
             (increase(pharos_slo_good_requests_total{slo=\"fast\",sli=\"latency\"}[28d])) or 0 * \
             sum by",
            "Objective: 99% of the requests succeed within 200 ms, over 28d.",
            "Objective: 99.9% of the requests succeed, over 28d.",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
    }

    #[test]
    fn indicators_of_tokens_have_their_words() {
        let text = of("{name: chat, time_to_first_token: {threshold: 1s, share: 95%}, \
                       inter_token_latency: {threshold: 50ms, share: 99%}}");
        assert_eq!(text.matches("- alert: PharosSloBudgetBurn").count(), 4, "{text}");
        for expected in [
            "{slo=\"chat\",sli=\"time_to_first_token\"} > 14.4 * 0.05",
            "Objective: 95% of the streams have their first token within 1000 ms, over 30d.",
            "{{ $value | humanizePercentage }} of the streams are bad.",
            "Objective: 99% of the tokens follow the previous one within 50 ms, over 30d.",
            "labels: {slo: \"chat\", sli: inter_token_latency}",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
    }

    #[test]
    fn writes_shares_without_rounding_errors() {
        for (share, budget) in
            [("99.9%", "0.001"), ("99.99%", "0.0001"), ("0.97", "0.03"), ("99.95%", "0.0005")]
        {
            let text = of(&format!("{{name: a, availability: {share}}}"));
            assert!(text.contains(&format!("> 14.4 * {budget} and")), "{share}: {text}");
        }
    }
}
