//! `xds.service.orca.v3.OpenRcaService`: streams of the server's load reports, for load balancers
//! that see no responses.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::load_report::PERIOD;
use pharos::service::{OpenStream, Protocol, SharedService};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Interval, MissedTickBehavior, interval};
use tonic::codegen::tokio_stream::Stream;
use tonic::{Request, Response, Status};

use self::proto::OrcaLoadReportRequest;
use self::proto::open_rca_service_server::OpenRcaService;
use super::call::status;
use super::raw::RawMessage;

/// The generated request and the service of package `xds.service.orca.v3`.
#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]
pub(super) mod proto {
    include!(concat!(env!("OUT_DIR"), "/xds.service.orca.v3.rs"));
    /// The descriptors of the proto files, for reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/orca.bin"));
}

/// The name of the service.
pub(super) const SERVICE: &str = "xds.service.orca.v3.OpenRcaService";

/// The maximum size of a request in bytes.
pub(super) const MAX_REQUEST: usize = 64 << 10;

/// The maximum number of open streams. A load balancer needs one.
const MAX_STREAMS: usize = 64;

/// `google.protobuf.Duration`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub(super) struct Duration {
    /// Whole seconds.
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
    /// Nanoseconds, of the same sign.
    #[prost(int32, tag = "2")]
    pub(super) nanos: i32,
}

/// The service.
pub(super) struct OpenRca {
    service: SharedService,
    places: Arc<Semaphore>,
}

impl OpenRca {
    pub(super) fn new(service: SharedService) -> Self {
        Self { service, places: Arc::new(Semaphore::new(MAX_STREAMS)) }
    }
}

#[tonic::async_trait]
impl OpenRcaService for OpenRca {
    type StreamCoreMetricsStream = LoadReports;

    /// Reports the load now and then at the interval of the request, rounded up to a multiple of
    /// the sampling period.
    async fn stream_core_metrics(
        self: Arc<Self>,
        request: Request<OrcaLoadReportRequest>,
    ) -> Result<Response<LoadReports>, Status> {
        let Ok(place) = self.places.clone().try_acquire_owned() else {
            let text = format!(
                "too many streams of load reports: at most {MAX_STREAMS} may be open at once"
            );
            let error = InferError::new(ErrorCode::Unavailable, Reason::QueueFull, text);
            return Err(status(error));
        };
        let every = periods(request.get_ref().report_interval);
        Ok(Response::new(LoadReports::new(self.service.clone(), PERIOD, every, place)))
    }
}

/// Returns the number of sampling periods in an interval, rounded up; 1 for none, or one that is
/// not positive.
fn periods(interval: Option<Duration>) -> u64 {
    let Duration { seconds, nanos } = interval.unwrap_or_default();
    let whole = u64::try_from(seconds).unwrap_or_default().saturating_add(u64::from(nanos > 0));
    whole.div_ceil(PERIOD.as_secs()).max(1)
}

/// The load reports of one stream. It ends when the server exits.
pub(super) struct LoadReports {
    service: SharedService,
    ticks: Interval,
    /// The number of ticks between two reports.
    every: u64,
    /// The number of ticks before the next report.
    until_next: u64,
    _open: OpenStream,
    _place: OwnedSemaphorePermit,
}

impl LoadReports {
    /// Returns a report now, and then one after every so many periods.
    fn new(
        service: SharedService,
        period: std::time::Duration,
        every: u64,
        place: OwnedSemaphorePermit,
    ) -> Self {
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let open = service.stream_open(Protocol::Grpc);
        Self { service, ticks, every, until_next: 0, _open: open, _place: place }
    }
}

impl Stream for LoadReports {
    type Item = Result<RawMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            ready!(self.ticks.poll_tick(cx));
            if self.service.exiting() {
                return Poll::Ready(None);
            }
            if self.until_next == 0 {
                self.until_next = self.every - 1;
                return Poll::Ready(Some(Ok(RawMessage(
                    self.service.load_report("", "").message(),
                ))));
            }
            self.until_next -= 1;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos_service_double::EchoService;
    use tonic::codegen::tokio_stream::StreamExt;

    use super::*;

    fn request(seconds: i64) -> Request<OrcaLoadReportRequest> {
        let report_interval = Some(Duration { seconds, nanos: 0 });
        Request::new(OrcaLoadReportRequest { report_interval, request_cost_names: Vec::new() })
    }

    #[test]
    fn intervals_are_whole_periods() {
        let of = |seconds, nanos| periods(Some(Duration { seconds, nanos }));
        assert_eq!(
            (periods(None), of(0, 0), of(0, 1), of(-5, -1), of(0, i32::MIN)),
            (1, 1, 1, 1, 1)
        );
        assert_eq!((of(1, 0), of(1, 1), of(30, 0), of(i64::MAX, 1)), (1, 2, 30, 1 << 63));
        assert_eq!(of(i64::MIN, i32::MAX), 1);
    }

    #[tokio::test]
    async fn a_report_follows_at_once_and_after_each_interval() {
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let period = std::time::Duration::from_millis(2);
        let mut reports = LoadReports::new(EchoService::default().shared(), period, 4, place);
        let begin = pharos_os::clock::now();
        for earliest in [0, 4, 8] {
            let RawMessage(report) = reports.next().await.unwrap().unwrap();
            assert_eq!(report, [&[(6 << 3) | 1][..], &2f64.to_le_bytes()].concat());
            // Ticks are at least a period apart.
            assert!(pharos_os::clock::now() - begin >= period * earliest, "{earliest}");
        }
    }

    #[tokio::test]
    async fn streams_are_limited() {
        let service = Arc::new(OpenRca::new(EchoService::default().shared()));
        let mut open = Vec::new();
        for _ in 0..MAX_STREAMS {
            open.push(service.clone().stream_core_metrics(request(1)).await.unwrap());
        }
        let refused = service.clone().stream_core_metrics(request(1)).await.err().unwrap();
        assert_eq!(refused.code(), tonic::Code::Unavailable);
        open.pop();
        assert!(service.stream_core_metrics(request(1)).await.is_ok());
    }
}
