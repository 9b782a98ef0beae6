//! The frontend's executable: its flags, and the order of its start and its end.

pub mod cli;
mod commands;
pub mod start;
