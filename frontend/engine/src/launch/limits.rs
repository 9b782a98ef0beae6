//! The limits of the programs that run models: how much memory and processor time they may use, and
//! how many processes and threads they may start.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use pharos_os::control_groups::{ControlGroup, ControlGroups, Limits};

use super::Model;
use super::settings::{Program, WorkerLimits};

/// The parameters with which a model sets a lower limit than the server's.
const MEMORY: &str = "memory_limit";
const TASKS: &str = "task_limit";
const PROCESSORS: &str = "cpu_limit";

/// The values of a model's parameters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Parameters<'a> {
    memory: Option<&'a str>,
    tasks: Option<&'a str>,
    processors: Option<&'a str>,
}

impl<'a> Parameters<'a> {
    /// Returns the values, read with a function that returns the parameter of a name.
    pub(crate) fn of(parameter: impl Fn(&str) -> Option<&'a str>) -> Self {
        Self {
            memory: parameter(MEMORY),
            tasks: parameter(TASKS),
            processors: parameter(PROCESSORS),
        }
    }
}

/// The limits of each process of a model, and what enforces them.
#[derive(Clone, Debug)]
pub(crate) struct Limited {
    limits: Limits,
    groups: Arc<ControlGroups>,
}

impl Limited {
    /// Makes a control group with the limits. Blocks.
    ///
    /// # Errors
    /// The group cannot be made; the text contains the reason.
    pub(crate) fn group(&self) -> Result<ControlGroup, String> {
        self.groups.create(&self.limits)
    }

    /// Returns the number of processors that one process can keep busy; `None` without a limit.
    pub(crate) fn processors(&self) -> Option<usize> {
        self.limits.processors.map(|processors| processors.ceil() as usize)
    }
}

/// Returns the limits of a model's processes; `None` for none. Blocks.
///
/// # Errors
/// A parameter of the model is invalid or exceeds the server's limit, or limits cannot be enforced
/// here.
pub(super) fn of(program: &Program, model: &Model<'_>) -> Result<Option<Limited>, String> {
    let WorkerLimits { limits: most, groups } = &program.limits;
    let Parameters { memory, tasks, processors } = model.limits;
    let memory = Bound {
        parameter: MEMORY,
        value: memory,
        flag: "--worker-memory-limit",
        most: most.memory,
    };
    let tasks =
        Bound { parameter: TASKS, value: tasks, flag: "--worker-task-limit", most: most.tasks };
    let processors = Bound {
        parameter: PROCESSORS,
        value: processors,
        flag: "--worker-cpu-limit",
        most: most.processors,
    };
    let limits = Limits {
        memory: memory.limit(model, parse_memory)?,
        tasks: tasks.limit(model, parse_tasks)?,
        processors: processors.limit(model, parse_processors)?,
    };
    if !limits.any() {
        return Ok(None);
    }
    groups.check(&limits).map_err(|reason| {
        format!("model '{}': its workers cannot be limited: {reason}", model.name)
    })?;
    Ok(Some(Limited { limits, groups: groups.clone() }))
}

/// A limit of the server, and the parameter with which a model lowers it.
struct Bound<'a, T> {
    parameter: &'static str,
    value: Option<&'a str>,
    flag: &'static str,
    most: Option<T>,
}

impl<T: Copy + PartialOrd + Display> Bound<'_, T> {
    /// Returns the limit of the parameter if the model has it, else the server's.
    fn limit(
        &self,
        model: &Model<'_>,
        parse: fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.value else { return Ok(self.most) };
        let refused = |allowed: String| {
            let model = model.name;
            let parameter = self.parameter;
            let value = value.escape_debug();
            format!(
                "model '{model}': its parameter '{parameter}' is '{value}'; allowed is {allowed}"
            )
        };
        let limit = parse(value).map_err(refused)?;
        match self.most.filter(|most| limit > *most) {
            Some(most) => Err(refused(format!("at most {most}, the value of {}", self.flag))),
            None => Ok(Some(limit)),
        }
    }
}

/// Parses a memory limit in bytes.
///
/// # Errors
/// The text is not a number of bytes from 1 MiB on; the error contains what is allowed.
pub fn parse_memory(text: &str) -> Result<u64, String> {
    parsed(text, |bytes: &u64| *bytes >= 1 << 20, "a number of bytes from 1048576 (1 MiB) on")
}

/// Parses a limit of processes and threads.
///
/// # Errors
/// The text is not a number of at least 1; the error contains what is allowed.
pub fn parse_tasks(text: &str) -> Result<u32, String> {
    parsed(
        text,
        |tasks: &u32| (1..=MOST_TASKS).contains(tasks),
        "a number of processes and threads from 1 to 4194304",
    )
}

/// Parses a limit of processor time, as a number of processors.
///
/// # Errors
/// The text is not a number from 0.01 to 1024; the error contains what is allowed.
pub fn parse_processors(text: &str) -> Result<f64, String> {
    parsed(
        text,
        |processors: &f64| (0.01..=1024.0).contains(processors),
        "a number of processors from 0.01 to 1024",
    )
}

/// The most processes and threads that the kernel supports.
const MOST_TASKS: u32 = 1 << 22;

fn parsed<T: FromStr>(text: &str, is_allowed: fn(&T) -> bool, allowed: &str) -> Result<T, String> {
    text.trim().parse().ok().filter(is_allowed).ok_or_else(|| allowed.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::path::Path;

    use pharos::model::Provenance;

    use super::*;

    /// A server with this memory limit whose control group has the directory as its tree.
    fn program(tree: &Path, memory: Option<u64>) -> Program {
        fs::create_dir_all(tree.join("self")).unwrap();
        fs::write(tree.join("self/cgroup"), "0::/\n").unwrap();
        fs::write(tree.join("cgroup.controllers"), "cpu memory\n").unwrap();
        fs::write(tree.join("cgroup.subtree_control"), "").unwrap();
        let groups = Arc::new(ControlGroups::new(tree, tree));
        let limits = Limits { memory, ..Limits::default() };
        Program { limits: WorkerLimits { limits, groups }, ..Program::default() }
    }

    fn limits(program: &Program, parameters: Parameters<'_>) -> Result<Option<Limits>, String> {
        let directory = Path::new("/models/m");
        let model = Model {
            name: "m",
            backend: "python",
            library: None,
            environment: None,
            sandbox: None,
            provenance: Provenance::default(),
            limits: parameters,
            directory,
            version: directory,
        };
        Ok(of(program, &model)?.map(|limited| limited.limits))
    }

    #[test]
    fn a_model_can_only_lower_the_limits_of_the_server() {
        let tree = tempfile::tempdir().unwrap();
        let with = |memory| Parameters { memory: Some(memory), ..Parameters::default() };
        let none = program(tree.path(), None);
        assert_eq!(limits(&none, Parameters::default()), Ok(None));
        let memory = |bytes| Ok(Some(Limits { memory: Some(bytes), ..Limits::default() }));
        assert_eq!(limits(&none, with("2000000")), memory(2_000_000));
        let some = program(tree.path(), Some(3_000_000));
        assert_eq!(limits(&some, Parameters::default()), memory(3_000_000));
        assert_eq!(limits(&some, with("2000000")), memory(2_000_000));
        let error = limits(&some, with("3000001")).unwrap_err();
        assert_eq!(
            error,
            "model 'm': its parameter 'memory_limit' is '3000001'; allowed is at most 3000000, \
             the value of --worker-memory-limit"
        );
    }

    #[test]
    fn invalid_limits_are_refused() {
        let tree = tempfile::tempdir().unwrap();
        let program = program(tree.path(), None);
        let all = Parameters::of(|name| match name {
            MEMORY => Some("1048576"),
            PROCESSORS => Some("0.5"),
            _ => None,
        });
        let expected = Limits { memory: Some(1 << 20), tasks: None, processors: Some(0.5) };
        assert_eq!(limits(&program, all), Ok(Some(expected)));
        for (parameters, allowed) in [
            (
                Parameters { memory: Some("1G"), ..all },
                "'memory_limit' is '1G'; allowed is a number of bytes from 1048576",
            ),
            (Parameters { memory: Some("1048575"), ..all }, "'1048575'; allowed"),
            (
                Parameters { processors: Some("NaN"), ..all },
                "'cpu_limit' is 'NaN'; allowed is a number of processors",
            ),
            (
                Parameters { tasks: Some("0"), ..all },
                "'task_limit' is '0'; allowed is a number of processes and threads",
            ),
            (
                Parameters { tasks: Some("5"), ..all },
                "its workers cannot be limited: the control group",
            ),
        ] {
            let error = limits(&program, parameters).unwrap_err();
            assert!(error.starts_with("model 'm': ") && error.contains(allowed), "{error}");
        }
    }
}
