//! Decides whether a model runs in a sandbox: the rule that says which party may decide what.
//!
//! | party | may decide |
//! |---|---|
//! | the operator, by `--worker-sandbox` | the default, and the least isolation of models whose code came by request |
//! | the operator, by the parameter `sandbox` in a configuration of a repository | everything but `off` under `--worker-sandbox=on` |
//! | a request, by the parameter in a configuration that came with it | more isolation than the default, never less |
//! | a model that loads another with a configuration or files that it sends | as a request, and never less isolation than it has itself |

use super::SANDBOX;

/// The models that run in a sandbox (`--worker-sandbox`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxMode {
    /// Those whose configuration asks for it.
    Off,
    /// In addition those whose code came by request, as far as the kernel supports it.
    #[default]
    Uploads,
    /// All, as far as the kernel supports it, except for models of the operator whose configuration
    /// switches it off.
    Auto,
    /// All. Models do not run without it.
    On,
}

impl SandboxMode {
    /// The names of the modes.
    pub const NAMES: [(&str, Self); 4] =
        [("off", Self::Off), ("uploads", Self::Uploads), ("auto", Self::Auto), ("on", Self::On)];

    /// Returns the name of the mode.
    pub fn name(self) -> &'static str {
        Self::NAMES.into_iter().find(|(_, mode)| *mode == self).map_or("", |(name, _)| name)
    }
}

/// The source of a model's code: its files, and the settings that determine which code runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CodeOrigin {
    /// The operator has put it where it is: into a repository or a model store.
    #[default]
    Operator,
    /// A request has brought it, or has chosen the directory or the address from which it comes.
    Request,
}

/// How a model is separated from the machine; the weakest comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isolation {
    /// It has the rights of its user.
    #[default]
    None,
    /// It is in a sandbox with a network.
    Network,
    /// It is in a sandbox without a network.
    Full,
}

impl Isolation {
    /// The values of the parameter.
    const NAMES: [(&str, Self); 3] =
        [("off", Self::None), ("network", Self::Network), ("on", Self::Full)];
}

/// The sandbox of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SandboxChoice {
    /// The isolation.
    pub isolation: Isolation,
    /// Whether the model must not run where the kernel cannot restrict it.
    pub required: bool,
}

/// The sources of a model and of its code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Provenance {
    /// The source of its code.
    pub origin: CodeOrigin,
    /// The sandbox of the model that has loaded it with a configuration or files that it has sent.
    pub loaded_by: Option<SandboxChoice>,
}

impl Provenance {
    /// Returns the sandbox of the model, which has this value of the parameter `sandbox`.
    ///
    /// # Errors
    /// The parameter has an unknown value, or one that permits more than the model may have; the
    /// end of a sentence about the parameter.
    pub fn sandbox(
        &self,
        mode: SandboxMode,
        parameter: Option<&str>,
    ) -> Result<SandboxChoice, String> {
        use CodeOrigin::{Operator, Request};
        use SandboxMode::{Auto, Off, On, Uploads};
        let default = match (mode, self.origin) {
            (Off, _) | (Uploads, Operator) => Isolation::None,
            (Uploads, Request) | (Auto | On, _) => Isolation::Full,
        };
        let least = match (mode, self.origin) {
            (Off, _) | (Uploads | Auto, Operator) => Isolation::None,
            (On, Operator) => Isolation::Network,
            (Uploads | Auto | On, Request) => Isolation::Full,
        };
        let loader = self.loaded_by.unwrap_or_default();
        let asked = parameter.map(parse).transpose()?;
        let isolation = asked.unwrap_or(default.max(loader.isolation));
        let name = parameter.unwrap_or_default();
        if isolation < loader.isolation {
            return Err(format!("'{name}', which permits more than the model has that loads it"));
        }
        if isolation < least {
            let flag = format!("'{name}', which --worker-sandbox={} does not allow", mode.name());
            return Err(match self.origin {
                Operator => flag,
                Request => format!("{flag} for code that came by request; allowed is on"),
            });
        }
        let required =
            isolation != Isolation::None && (mode == On || asked.is_some() || loader.required);
        Ok(SandboxChoice { isolation, required })
    }
}

fn parse(value: &str) -> Result<Isolation, String> {
    let known = Isolation::NAMES.into_iter().find(|(name, _)| *name == value);
    known
        .map(|(_, isolation)| isolation)
        .ok_or_else(|| format!("'{}'; allowed are on, off and network", value.escape_debug()))
}

/// Returns why the parameter of a model is refused.
pub fn refused_sandbox(model: &str, what: &str) -> String {
    format!("model '{model}': its parameter '{SANDBOX}' is {what}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The sandboxes of models with this parameter, under each mode.
    fn chosen(parameter: Option<&str>, origin: CodeOrigin) -> [&'static str; 4] {
        SandboxMode::NAMES.map(|(_, mode)| {
            let chosen = Provenance { origin, loaded_by: None }.sandbox(mode, parameter);
            match chosen.map(|SandboxChoice { isolation, required }| (isolation, required)) {
                Ok((Isolation::None, _)) => "none",
                Ok((Isolation::Network, true)) => "required, network",
                Ok((Isolation::Network, false)) => "possible, network",
                Ok((Isolation::Full, true)) => "required",
                Ok((Isolation::Full, false)) => "possible",
                Err(_) => "error",
            }
        })
    }

    #[test]
    fn the_flag_and_the_operator_select_the_sandbox() {
        for (parameter, expected) in [
            (None, ["none", "none", "possible", "required"]),
            (Some("off"), ["none", "none", "none", "error"]),
            (Some("on"), ["required"; 4]),
            (Some("network"), ["required, network"; 4]),
            (Some("ON"), ["error"; 4]),
        ] {
            assert_eq!(chosen(parameter, CodeOrigin::Operator), expected, "{parameter:?}");
        }
    }

    #[test]
    fn a_request_can_only_ask_for_more_isolation() {
        for (parameter, expected) in [
            (None, ["none", "possible", "possible", "required"]),
            (Some("off"), ["none", "error", "error", "error"]),
            (Some("network"), ["required, network", "error", "error", "error"]),
            (Some("on"), ["required"; 4]),
        ] {
            assert_eq!(chosen(parameter, CodeOrigin::Request), expected, "{parameter:?}");
        }
    }

    #[test]
    fn a_model_cannot_load_one_with_more_rights() {
        let isolations = [Isolation::None, Isolation::Network, Isolation::Full];
        for (_, mode) in SandboxMode::NAMES {
            for isolation in isolations {
                for parameter in [None, Some("off"), Some("network"), Some("on")] {
                    let loader =
                        SandboxChoice { isolation, required: isolation != Isolation::None };
                    let provenance =
                        Provenance { origin: CodeOrigin::Request, loaded_by: Some(loader) };
                    if let Ok(chosen) = provenance.sandbox(mode, parameter) {
                        assert!(
                            chosen.isolation >= isolation && chosen.required >= loader.required,
                            "{parameter:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn refusals_name_the_value_and_what_is_allowed() {
        let refused = |parameter, origin, loaded_by, mode| {
            Provenance { origin, loaded_by }.sandbox(mode, Some(parameter)).unwrap_err()
        };
        let full = Some(SandboxChoice { isolation: Isolation::Full, required: true });
        for (text, expected) in [
            (
                refused("off", CodeOrigin::Operator, None, SandboxMode::On),
                "'off', which --worker-sandbox=on does not allow",
            ),
            (
                refused("no", CodeOrigin::Operator, None, SandboxMode::Auto),
                "'no'; allowed are on, off and network",
            ),
            (
                refused("network", CodeOrigin::Request, None, SandboxMode::Uploads),
                "'network', which --worker-sandbox=uploads does not allow for code that came by \
                 request; allowed is on",
            ),
            (
                refused("network", CodeOrigin::Request, full, SandboxMode::Off),
                "'network', which permits more than the model has that loads it",
            ),
        ] {
            assert_eq!(text, expected);
        }
    }
}
