//! Announces client memory to a worker: packets over a dedicated socket, sent before the first
//! frame that uses the memory.
//!
//! A packet holds up to [`MAX_REGIONS_PER_PACKET`] descriptions. Each description of system memory
//! comes with a descriptor, in the same order.

use super::codec::{DecodeError, Result, Wire, take, whole};
use crate::region::{CUDA_HANDLE, MAX_NAME};

/// The maximum number of regions in a packet. Each may come with a descriptor; the kernel passes at
/// most 253 at a time.
pub const MAX_REGIONS_PER_PACKET: usize = 32;

/// The maximum size of a packet, bytes.
pub const MAX_PACKET: usize = MAX_REGIONS_PER_PACKET * (MAX_NAME + 256);

/// The description of a region for a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionDescription {
    /// The number; never 0.
    pub id: u64,
    /// The name, for messages.
    pub name: String,
    /// Bytes.
    pub byte_size: u64,
    /// The location.
    pub location: RegionLocation,
}

/// The location of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionLocation {
    /// In the file of the descriptor that comes with the packet.
    System {
        /// The offset of the region in the file, bytes.
        offset: u64,
    },
    /// On a CUDA device.
    Cuda {
        /// The device's number.
        device: u32,
        /// The IPC handle that opens it.
        handle: Box<[u8; CUDA_HANDLE]>,
    },
}

impl Wire for RegionDescription {
    fn put(&self, out: &mut Vec<u8>) {
        self.id.put(out);
        self.name.put(out);
        self.byte_size.put(out);
        match &self.location {
            RegionLocation::System { offset } => {
                out.push(0);
                offset.put(out);
            }
            RegionLocation::Cuda { device, handle } => {
                out.push(1);
                device.put(out);
                out.extend_from_slice(&**handle);
            }
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        let id = Wire::get(input)?;
        let name = Wire::get(input)?;
        let byte_size = Wire::get(input)?;
        let location = match u8::get(input)? {
            0 => RegionLocation::System { offset: Wire::get(input)? },
            1 => {
                let device = Wire::get(input)?;
                let handle = take(input, CUDA_HANDLE)?
                    .try_into()
                    .map_err(|_| DecodeError::new("handle", 0))?;
                RegionLocation::Cuda { device, handle: Box::new(handle) }
            }
            other => return Err(DecodeError::new("kind of region", other.into())),
        };
        Ok(Self { id, name, byte_size, location })
    }
}

/// Encodes a packet.
pub fn encode(regions: &[RegionDescription]) -> Vec<u8> {
    let mut out = Vec::new();
    u32::try_from(regions.len()).unwrap_or(u32::MAX).put(&mut out);
    regions.iter().for_each(|region| region.put(&mut out));
    out
}

/// Decodes a packet.
///
/// # Errors
/// The bytes are not exactly one packet.
pub fn decode(packet: &[u8]) -> Result<Vec<RegionDescription>> {
    whole(packet, Wire::get)
}

/// The argument that makes a worker process probe CUDA memory and exit. The device's number
/// follows; the handle comes on standard input.
pub const PROBE: &str = "--look-at-cuda-memory";

/// The output of a probe process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probed {
    /// The handle opens memory of this many bytes.
    Bytes(u64),
    /// The machine has no GPU or no driver.
    NoGpu(String),
    /// The driver refuses to open the handle.
    Refused(String),
}

impl Probed {
    /// Formats the result as a line.
    pub fn line(&self) -> String {
        match self {
            Self::Bytes(bytes) => format!("bytes {bytes}"),
            Self::NoGpu(why) => format!("none {}", why.replace('\n', " ")),
            Self::Refused(why) => format!("refused {}", why.replace('\n', " ")),
        }
    }

    /// Parses the last line of a text; `None` if it is not a result.
    pub fn parse(text: &str) -> Option<Self> {
        let (word, rest) = text.trim_end().lines().last()?.split_once(' ')?;
        match word {
            "bytes" => rest.parse().ok().map(Self::Bytes),
            "none" => Some(Self::NoGpu(rest.to_owned())),
            "refused" => Some(Self::Refused(rest.to_owned())),
            _ => None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_output_of_a_probe() {
        let all = [
            Probed::Bytes(7),
            Probed::NoGpu("no driver".into()),
            Probed::Refused("invalid\nhandle".into()),
        ];
        for probed in all {
            let read = Probed::parse(&format!("a library talks\n{}\n", probed.line()));
            assert_eq!(read.map(|read| read.line()), Some(probed.line()));
        }
        for nothing in ["", "bytes", "bytes x", "what now"] {
            assert_eq!(Probed::parse(nothing), None);
        }
    }

    #[test]
    fn packets_round_trip() {
        let region =
            |id, location| RegionDescription { id, name: "n".into(), byte_size: 7, location };
        let all = vec![
            region(1, RegionLocation::System { offset: 4096 }),
            region(
                u64::MAX,
                RegionLocation::Cuda { device: 3, handle: Box::new([7; CUDA_HANDLE]) },
            ),
        ];
        let packet = encode(&all);
        assert_eq!(decode(&packet).unwrap(), all);
        for cut in 0..packet.len() {
            assert!(decode(&packet[..cut]).is_err(), "{cut}");
        }
        let name = "n".repeat(MAX_NAME);
        let location = RegionLocation::Cuda { device: 0, handle: Box::new([0; CUDA_HANDLE]) };
        let largest = RegionDescription { id: 1, name, byte_size: 1, location };
        assert!(encode(&vec![largest; MAX_REGIONS_PER_PACKET]).len() <= MAX_PACKET);
    }
}
