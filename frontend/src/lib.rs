//! The frontend's executable: its flags, commands, start and exit.

pub mod cli;
mod commands;
mod examples;
pub mod start;
