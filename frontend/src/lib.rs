//! The frontend: protocols in, worker processes out.

pub mod cli;
pub mod engine;
pub mod grpc;
pub mod http;
pub mod listener;
