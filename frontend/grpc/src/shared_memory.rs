//! The six rpcs for shared memory of clients (spec 2.10). An empty name selects all regions.

use pharos::error::InferError;
use pharos::region::{Kind, Memory};
use pharos::service::Service;

use super::proto::{
    self, CudaSharedMemoryStatusResponse, SystemSharedMemoryStatusResponse,
    cuda_shared_memory_status_response, system_shared_memory_status_response,
};

fn one(name: &str) -> Option<&str> {
    Some(name).filter(|name| !name.is_empty())
}

pub(super) fn system_status(
    service: &dyn Service,
    name: &str,
) -> Result<SystemSharedMemoryStatusResponse, InferError> {
    let regions = service.memory_status(Kind::System, one(name))?.into_iter().map(|status| {
        let region = status.region;
        let (key, offset) = match &region.memory {
            Memory::System { key, offset, .. } => (key.clone(), *offset),
            Memory::Cuda { .. } => Default::default(),
        };
        let name = region.name.clone();
        let byte_size = region.byte_size;
        (
            name.clone(),
            system_shared_memory_status_response::RegionStatus { name, key, offset, byte_size },
        )
    });
    Ok(SystemSharedMemoryStatusResponse { regions: regions.collect() })
}

pub(super) fn system_register(
    service: &dyn Service,
    asked: &proto::SystemSharedMemoryRegisterRequest,
) -> Result<(), InferError> {
    service.register_system_memory(&asked.name, &asked.key, asked.offset, asked.byte_size)
}

pub(super) fn unregister(service: &dyn Service, kind: Kind, name: &str) -> Result<(), InferError> {
    service.unregister_memory(kind, one(name))
}

pub(super) fn cuda_status(
    service: &dyn Service,
    name: &str,
) -> Result<CudaSharedMemoryStatusResponse, InferError> {
    let regions = service.memory_status(Kind::Cuda, one(name))?.into_iter().map(|status| {
        let region = status.region;
        let device_id = match &region.memory {
            Memory::Cuda { device, .. } => u64::from(*device),
            Memory::System { .. } => 0,
        };
        let name = region.name.clone();
        let byte_size = region.byte_size;
        (
            name.clone(),
            cuda_shared_memory_status_response::RegionStatus { name, device_id, byte_size },
        )
    });
    Ok(CudaSharedMemoryStatusResponse { regions: regions.collect() })
}

pub(super) async fn cuda_register(
    service: &dyn Service,
    asked: &proto::CudaSharedMemoryRegisterRequest,
) -> Result<(), InferError> {
    service
        .register_cuda_memory(&asked.name, &asked.raw_handle, asked.device_id, asked.byte_size)
        .await
}
