//! Error messages of invalid command lines: they name the flag, the value, its source and the
//! allowed values.

use std::error::Error as _;
use std::ffi::OsString;
use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, Error};

/// Flags that environment variables set, each with its variable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Origins(Vec<(String, String)>);

impl Origins {
    pub(super) fn new(command: &Command, matches: &ArgMatches) -> Self {
        let given = command.get_arguments().filter(|arg| {
            matches.try_contains_id(arg.get_id().as_str()).is_ok()
                && matches.value_source(arg.get_id().as_str()) == Some(ValueSource::EnvVariable)
        });
        Self(given.filter_map(|arg| Some((arg.get_long()?.to_owned(), variable(arg)?))).collect())
    }

    /// Adds the environment variables that set the flags named in the first line of a message.
    pub(super) fn explain(&self, text: &str) -> String {
        let (first, rest) = text.split_at(text.find('\n').unwrap_or(text.len()));
        let is_named = |flag: &str| {
            first.match_indices("--").any(|(at, _)| {
                let rest = first[at + 2..].strip_prefix(flag);
                rest.is_some_and(|rest| {
                    !rest.starts_with(|next: char| next.is_ascii_alphanumeric() || next == '-')
                })
            })
        };
        let named = self.0.iter().filter(|(flag, _)| is_named(flag));
        let variables: Vec<&str> = named.map(|(_, variable)| variable.as_str()).collect();
        match variables.as_slice() {
            [] => text.to_owned(),
            variables => format!("{first} (from {}){rest}", variables.join(", ")),
        }
    }
}

/// Replaces the text of an error of clap where a more specific text exists. Errors of commands keep
/// clap's text, with the usage of the command.
pub(super) fn explained(error: Error, command: &Command, args: &[OsString]) -> Error {
    let of_command = command_of(command, args);
    let text = match error.kind() {
        ErrorKind::UnknownArgument if of_command.is_none() => {
            context(&error, ContextKind::InvalidArg).map(|name| unknown(&name, command))
        }
        ErrorKind::InvalidSubcommand if of_command.is_none() => {
            context(&error, ContextKind::InvalidSubcommand)
                .map(|name| unknown_command(&name, command))
        }
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => {
            bad_value(&error, command, of_command, args)
        }
        _ => None,
    };
    match text {
        Some(text) => command.clone().error(error.kind(), text),
        None => error,
    }
}

/// Returns the command that arguments name, if they name one.
fn command_of<'a>(command: &'a Command, args: &[OsString]) -> Option<&'a Command> {
    let mut found = None;
    let mut is_value = false;
    for arg in args.iter().skip(1).take_while(|arg| *arg != "--").map(|arg| arg.to_string_lossy()) {
        let inner = found.unwrap_or(command).find_subcommand(&*arg).filter(|_| !is_value);
        found = inner.or(found);
        is_value = arg.starts_with('-') && !arg.contains('=');
    }
    found
}

fn bad_value(
    error: &Error,
    command: &Command,
    inner: Option<&Command>,
    args: &[OsString],
) -> Option<String> {
    let shown = context(error, ContextKind::InvalidArg)?;
    let flag = shown.split([' ', '=', '[']).next()?.strip_prefix("--")?;
    if inner.is_some_and(|inner| inner.get_arguments().any(|arg| arg.get_long() == Some(flag))) {
        return None;
    }
    let arg = command.get_arguments().find(|arg| arg.get_long() == Some(flag))?;
    let value = context(error, ContextKind::InvalidValue).unwrap_or_default();
    let from = match variable(arg) {
        Some(variable) if !is_on(args, arg, command) => format!(" (from {variable})"),
        _ => String::new(),
    };
    let allowed = match (error.source(), error.get(ContextKind::ValidValue)) {
        (Some(reason), _) => reason.to_string(),
        (None, Some(ContextValue::Strings(allowed))) if !allowed.is_empty() => {
            format!("allowed are {}", allowed.join(", "))
        }
        _ if value.is_empty() => {
            let name = arg
                .get_value_names()
                .and_then(|names| names.first())
                .map_or("VALUE", |name| name.as_str());
            return Some(format!("--{flag} needs a value: --{flag}={name}"));
        }
        _ => return None,
    };
    Some(format!("invalid --{flag} \"{value}\": {allowed}{from}"))
}

/// Returns whether the command line contains the flag, under any of its names or, as with the
/// program name `tritonserver`, as a prefix of one. Other programs refuse a prefix before they
/// check values.
fn is_on(args: &[OsString], arg: &Arg, command: &Command) -> bool {
    args.iter().filter_map(|given| given.to_str()?.strip_prefix("--")).any(|given| {
        let given = given.split('=').next().unwrap_or(given);
        let is_name = |arg: &Arg| names(arg).any(|name| name == given);
        if is_name(arg) {
            return true;
        }
        let is_prefix = !given.is_empty() && names(arg).any(|name| name.starts_with(given));
        is_prefix && !command.get_arguments().any(is_name)
    })
}

/// Returns all names of a flag.
fn names(arg: &Arg) -> impl Iterator<Item = &str> {
    arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten())
}

fn variable(arg: &Arg) -> Option<String> {
    arg.get_env().and_then(|variable| variable.to_str()).map(str::to_owned)
}

fn context(error: &Error, kind: ContextKind) -> Option<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    }
}

/// Describes an unknown flag, with the flag that was probably meant if one has a similar name.
fn unknown(given: &str, command: &Command) -> String {
    let Some(name) = given.strip_prefix("--").filter(|name| !name.is_empty()) else {
        return match given.starts_with('-') {
            true => format!(
                "unknown flag {given}; flags have the form --flag=VALUE, and --help lists them"
            ),
            false => format!(
                "unexpected argument \"{given}\": values are given as --flag=VALUE or --flag VALUE"
            ),
        };
    };
    let known: Vec<&str> = command.get_arguments().filter_map(Arg::get_long).collect();
    let begins: Vec<&str> = known.iter().copied().filter(|known| known.starts_with(name)).collect();
    match nearest(name, &known) {
        Some(one) => format!("unknown flag {given}; did you mean --{one}?"),
        None if begins.is_empty() => format!("unknown flag {given}; --help lists all flags"),
        None => format!("unknown flag {given}; flags with this prefix: --{}", begins.join(", --")),
    }
}

/// Describes an unknown command, which may be a place of models or a misspelt command.
fn unknown_command(given: &str, command: &Command) -> String {
    let known: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
    match nearest(given, &known) {
        Some(meant) => format!("unknown command '{given}'; did you mean '{meant}'?"),
        None if given.contains(['/', '.']) || Path::new(given).exists() => {
            format!("'{given}' is not a command; `{} serve {given}` serves it", command.get_name())
        }
        None => format!("unknown command '{given}'; --help lists the commands"),
    }
}

/// Returns the name that was probably meant: one with at most two wrong characters, else the only
/// one that begins like it.
pub(super) fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let nearest = known.iter().map(|known| (distance(name, known), *known)).min();
    let near = nearest.filter(|(distance, known)| *distance <= 2 && *distance * 4 <= known.len());
    let mut begins = known.iter().copied().filter(|known| known.starts_with(name));
    let only = begins.next().filter(|_| begins.next().is_none());
    near.map(|(_, one)| one).or(only)
}

/// Returns the number of characters to insert, remove, replace or swap with a neighbor (optimal
/// string alignment distance).
fn distance(one: &str, other: &str) -> usize {
    let one: Vec<char> = one.chars().collect();
    let other: Vec<char> = other.chars().collect();
    let mut rows: Vec<Vec<usize>> = vec![(0..=other.len()).collect()];
    for i in 1..=one.len() {
        let mut row = vec![i];
        for j in 1..=other.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(one[i - 1] != other[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[one.len()][other.len()]
}
