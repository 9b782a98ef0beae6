//! Everything that the author of a Pharos backend imports.
//!
//! A [`Backend`] runs one instance of a model in a worker process. It sees a [`Batch`] with
//! contiguous inputs in shared memory and allocates its [`Outputs`] there. It never sees sockets,
//! frames or the bookkeeping of other requests. A backend that answers requests individually takes
//! a [`Responder`] for each; one that calls other models uses the [`Runtime`]; [`Metrics`]
//! records its metrics. The program that runs a backend is `pharos_worker::Worker`.
//!
//! The types are concrete: they hold the memory and the connection of the process themselves, so no
//! backend call on the path of a request uses dynamic dispatch or allocates memory just for the
//! interface. Devices and client memory are behind the traits [`Devices`](runtime::Devices) and
//! [`Regions`](runtime::Regions), so a backend's author needs no GPU library. Only requests
//! that use such memory call them.

mod aligned;
mod backend;
mod batch;
mod blocks;
mod calls;
mod client_memory;
mod clock;
mod connection;
mod deferred;
mod device;
mod error;
mod frame_stream;
mod frames;
mod log;
#[allow(unsafe_code)]
mod memory;
mod metrics;
pub mod onnx;
mod outputs;
mod parts;
mod readiness;
#[allow(unsafe_code)]
mod received;
mod reply;
mod responder;
mod session;
mod spin;
mod streams;

pub use backend::{Backend, Context, Create, Readiness};
pub use batch::{Batch, Input, ReceivedPiece, Source};
pub use calls::{Call, CallInput, Called, CalledOutput, Canceller, Pending};
pub use client_memory::OutputMemory;
pub use device::{DeviceInputs, DeviceMemory, ReceivedOnDevice, ScratchKind};
pub use error::{load_error, run_error};
pub use log::log;
pub use metrics::{
    Coalesced, Described, Metric, MetricError, Metrics, Requests, Series, UndeclaredSample,
};
pub use outputs::{Outputs, Response};
pub use parts::{ReceivedPart, RequestPart, in_clients_order};
pub use received::{Memory, Received};
pub use reply::{Content, Reply, ReplyOutput};
pub use responder::Responder;
pub use session::Runtime;

pub use pharos::wire::CallRequest;

/// Types with which the worker's runtime builds and answers batches. Backends do not use them.
pub mod runtime {
    pub use crate::aligned::{AlignedBuffer, joined};
    pub use crate::client_memory::{ClientAccess, ClientMemory, range_of, used_regions};
    pub mod clock {
        //! The clock of the worker.

        pub use crate::clock::now;
    }
    pub use crate::connection::Connection;
    pub use crate::device::{Devices, RegionRange, Regions};
    pub use crate::error::wire_error;
    pub use crate::frame_stream::{FrameReader, FrameWriter};
    pub use crate::frames::{Reader, Sender, connect};
    pub use crate::memory::{Guard, InputArena, OutputArena, map};
    pub use crate::outputs::{Finished, MadeOutput};
    pub use crate::received::{Arenas, BatchLoan, Loan};
    pub use crate::session::Session;
}
