//! `/v2/systemsharedmemory` and `/v2/cudasharedmemory`: shared memory of clients (spec 2.10). The
//! status has two members more than Triton's: the number of request tensors that are in a region
//! now, and the total so far.

use axum::body::Body;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::region::{Kind, Memory};
use pharos::service::Route;
use pharos::shared_memory::{Status, not_a_handle};
use serde::Serialize;
use serde_json::value::RawValue;

use super::answer::{Failure, HandlerResult, get, post};
use super::json::{from_body, object, parse_error};
use super::{Edge, answer};
use pharos_edge::routing::{Builder, Routed};

object! {
    /// A registration of system memory.
    System { key: &'a RawValue, offset: &'a RawValue, byte_size: &'a RawValue }
}
object! {
    /// A registration of CUDA memory.
    Cuda { raw_handle: &'a RawValue, device_id: &'a RawValue, byte_size: &'a RawValue }
}
object! {
    /// A CUDA handle.
    Handle { b64: &'a RawValue }
}

/// A region's status.
#[derive(Serialize)]
struct Shown<'a> {
    name: &'a str,
    #[serde(flatten)]
    place: Place<'a>,
    byte_size: u64,
    in_use: u64,
    uses: u64,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Place<'a> {
    System { key: &'a str, offset: u64 },
    Cuda { device_id: u32 },
}

/// Returns the region in the path of a request.
///
/// # Errors
/// The name is not valid UTF-8: the path does not exist.
fn region_of(routed: &mut Routed) -> Result<String, Failure> {
    routed.parameters.take().into_iter().flatten().next().ok_or_else(answer::unknown_path)
}

/// Adds the routes of both kinds of memory.
pub(super) fn routes(mut router: Builder<Edge>) -> Builder<Edge> {
    for kind in Kind::ALL {
        let base = format!("/v2/{}sharedmemory", kind.as_str());
        let all = move |edge: Edge, _: Routed| async move { status(&edge, kind, None) };
        let one = move |edge: Edge, mut routed: Routed| async move {
            let region = region_of(&mut routed)?;
            status(&edge, kind, Some(&region))
        };
        let remove_all = move |edge: Edge, _: Routed| async move { unregister(&edge, kind, None) };
        let remove = move |edge: Edge, mut routed: Routed| async move {
            let region = region_of(&mut routed)?;
            unregister(&edge, kind, Some(&region))
        };
        let add = move |edge: Edge, mut routed: Routed| async move {
            let region = region_of(&mut routed)?;
            register(&edge, kind, &region, routed.request.into_body()).await
        };
        router = router
            .route(&format!("{base}/status"), status_of(kind), get(all))
            .route(&format!("{base}/unregister"), unregister_of(kind), post(remove_all))
            .route(&format!("{base}/region/{{region}}/status"), status_of(kind), get(one))
            .route(
                &format!("{base}/region/{{region}}/unregister"),
                unregister_of(kind),
                post(remove),
            )
            .route(&format!("{base}/region/{{region}}/register"), register_of(kind), post(add));
    }
    router
}

fn status_of(kind: Kind) -> Route {
    match kind {
        Kind::System => Route::SystemSharedMemoryStatus,
        Kind::Cuda => Route::CudaSharedMemoryStatus,
    }
}

fn unregister_of(kind: Kind) -> Route {
    match kind {
        Kind::System => Route::SystemSharedMemoryUnregister,
        Kind::Cuda => Route::CudaSharedMemoryUnregister,
    }
}

fn register_of(kind: Kind) -> Route {
    match kind {
        Kind::System => Route::SystemSharedMemoryRegister,
        Kind::Cuda => Route::CudaSharedMemoryRegister,
    }
}

fn status(edge: &Edge, kind: Kind, region: Option<&str>) -> HandlerResult {
    let found = edge.service.memory_status(kind, region)?;
    answer::json_of(&found.iter().map(shown).collect::<Vec<_>>())
}

fn shown(Status { region, in_use }: &Status) -> Shown<'_> {
    let place = match &region.memory {
        Memory::System { key, offset, .. } => Place::System { key, offset: *offset },
        Memory::Cuda { device, .. } => Place::Cuda { device_id: *device },
    };
    Shown {
        name: &region.name,
        place,
        byte_size: region.byte_size,
        in_use: *in_use,
        uses: region.uses(),
    }
}

fn unregister(edge: &Edge, kind: Kind, region: Option<&str>) -> HandlerResult {
    answer::done(edge.service.unregister_memory(kind, region))
}

async fn register(edge: &Edge, kind: Kind, region: &str, body: Body) -> HandlerResult {
    let body = edge.read_short(body, "a shared memory registration").await?;
    answer::done(match kind {
        Kind::System => {
            let (key, (offset, byte_size)) = system(&body)?;
            edge.service.register_system_memory(region, &key, offset, byte_size)
        }
        Kind::Cuda => {
            let (handle, (device, byte_size)) = cuda(&body)?;
            edge.service.register_cuda_memory(region, &handle, device, byte_size).await
        }
    })
}

/// Returns the key, and the offset and size. A missing offset is 0, as in Triton.
pub(super) fn system(body: &[u8]) -> Result<(String, (u64, u64)), InferError> {
    let System { key, offset, byte_size } = members(body)?;
    let key = text(key.ok_or_else(|| missing("key"))?)?;
    let offset = offset.map(number).transpose()?.unwrap_or(0);
    Ok((key, (offset, number(byte_size.ok_or_else(|| missing("byte_size"))?)?)))
}

/// Returns the handle, and the device and size.
pub(super) fn cuda(body: &[u8]) -> Result<(Vec<u8>, (i64, u64)), InferError> {
    let Cuda { raw_handle, device_id, byte_size } = members(body)?;
    let raw_handle = raw_handle.ok_or_else(|| missing("raw_handle"))?;
    let Handle { b64 } = serde_json::from_str(raw_handle.get()).unwrap_or_default();
    let b64 = text(b64.ok_or_else(|| absent("b64"))?)?;
    let byte_size = number(byte_size.ok_or_else(|| absent("byte_size"))?)?;
    let device = number(device_id.ok_or_else(|| absent("device_id"))?)?;
    let handle = STANDARD.decode(b64).map_err(|_| not_a_handle())?;
    Ok((handle, (i64::try_from(device).unwrap_or(i64::MAX), byte_size)))
}

fn members<'a, T: Default + serde::Deserialize<'a>>(body: &'a [u8]) -> Result<T, InferError> {
    match from_body(body) {
        Ok(members) => Ok(members),
        // The text is JSON but not an object, so it has no members.
        Err(error) if error.is_data() => Ok(T::default()),
        Err(error) => Err(parse_error(error)),
    }
}

fn missing(member: &str) -> InferError {
    InferError::malformed(format!("Shared memory register request has no '{member}' field"))
}

fn absent(member: &str) -> InferError {
    wrong(&format!("attempt to access non-existing object member '{member}'"))
}

/// Returns an error of Triton's JSON reader, which has the code of a server error.
fn wrong(text: &str) -> InferError {
    InferError::new(ErrorCode::Internal, Reason::Malformed, text)
}

fn text(value: &RawValue) -> Result<String, InferError> {
    serde_json::from_str(value.get())
        .map_err(|_| wrong("attempt to access JSON non-string as string"))
}

fn number(value: &RawValue) -> Result<u64, InferError> {
    let text = "attempt to access JSON non-unsigned-integer as unsigned-integer";
    value.get().parse().map_err(|_| wrong(text))
}
