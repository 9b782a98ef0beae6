//! The times that a backend reports. They are the truth for the statistics of a batch: where the
//! inputs end and the outputs begin inside the time that the server measures.

use parking_lot::Mutex;

use crate::error::{ErrorPointer, Fault, interface};
use crate::foreign::put;
use crate::model::InstanceObject;
use crate::object::{self, Object, kinds};
use crate::request::Request;
use crate::response::Factory;

/// The times of a computation, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Computation {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl Computation {
    /// Returns the computation with these times; `None` if their order is wrong.
    fn new(times: [u64; 4]) -> Option<Self> {
        let [_, start, end, _] = times;
        times.is_sorted().then_some(Self { start, end })
    }

    fn with(self, other: Self) -> Self {
        Self { start: self.start.min(other.start), end: self.end.max(other.end) }
    }
}

/// What a backend reports about the batch that it executes. Locked to read or write it only.
#[derive(Default)]
pub(crate) struct Reports(Mutex<Reported>);

#[derive(Clone, Copy, Default)]
struct Reported {
    batch: Option<Computation>,
    /// Over all requests that were reported as successful.
    requests: Option<Computation>,
}

impl Reports {
    /// Forgets earlier reports, and those of requests that were answered after their batch.
    pub(crate) fn clear(&self) {
        *self.0.lock() = Reported::default();
    }

    /// Returns the times of the batch, if the backend has reported any.
    pub(crate) fn computation(&self) -> Option<Computation> {
        let reported = *self.0.lock();
        reported.batch.or(reported.requests)
    }
}

/// `TRITONBACKEND_ModelInstanceResponseStatistics`. The server measures the responses itself, so
/// the values are only checked.
#[derive(Default)]
pub(crate) struct ResponseStatistics(Mutex<SetFields>);

/// The fields that a report needs.
#[derive(Clone, Copy, Default)]
struct SetFields {
    instance: bool,
    factory: bool,
    start: bool,
    end: bool,
}

kinds! { ResponseStatistics = 16, "the statistics of a response"; }

interface! {
    /// `TRITONBACKEND_ModelInstanceReportStatistics`.
    fn report_request(
        instance: *const Object<InstanceObject>,
        request: *const Object<Request>,
        success: bool,
        exec_start: u64,
        compute_start: u64,
        compute_end: u64,
        exec_end: u64,
    ) {
        let instance = object::get(instance)?;
        object::get(request)?;
        let times = [exec_start, compute_start, compute_end, exec_end];
        let Some(computation) = Computation::new(times).filter(|_| success) else { return Ok(()) };
        let mut reported = instance.reports.0.lock();
        reported.requests =
            Some(reported.requests.map_or(computation, |other| other.with(computation)));
        Ok(())
    }

    /// `TRITONBACKEND_ModelInstanceReportBatchStatistics`.
    fn report_batch(
        instance: *const Object<InstanceObject>,
        _rows: u64,
        exec_start: u64,
        compute_start: u64,
        compute_end: u64,
        exec_end: u64,
    ) {
        let instance = object::get(instance)?;
        let times = [exec_start, compute_start, compute_end, exec_end];
        if let Some(computation) = Computation::new(times) {
            instance.reports.0.lock().batch = Some(computation);
        }
        Ok(())
    }

    /// `TRITONBACKEND_ModelInstanceResponseStatisticsNew`.
    fn response_new(statistics: *mut *mut Object<ResponseStatistics>) {
        put(statistics, object::make(ResponseStatistics::default()))
    }

    /// `TRITONBACKEND_ModelInstanceResponseStatisticsDelete`.
    fn response_delete(statistics: *mut Object<ResponseStatistics>) {
        object::delete(statistics)
    }

    /// `TRITONBACKEND_ModelInstanceResponseStatisticsSetModelInstance`.
    fn set_instance(
        statistics: *const Object<ResponseStatistics>,
        instance: *const Object<InstanceObject>,
    ) {
        object::get(instance)?;
        object::get(statistics)?.0.lock().instance = true;
        Ok(())
    }

    /// `TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseFactory`.
    fn set_factory(
        statistics: *const Object<ResponseStatistics>,
        factory: *const Object<Factory>,
    ) {
        object::get(factory)?;
        object::get(statistics)?.0.lock().factory = true;
        Ok(())
    }

    /// `TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseStart`.
    fn set_start(statistics: *const Object<ResponseStatistics>, _at: u64) {
        object::get(statistics)?.0.lock().start = true;
        Ok(())
    }

    /// `TRITONBACKEND_ModelInstanceResponseStatisticsSetComputeOutputStart`; 0 for an empty
    /// response.
    fn set_output_start(statistics: *const Object<ResponseStatistics>, _at: u64) {
        object::get(statistics).map(drop)
    }

    /// `TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseEnd`.
    fn set_end(statistics: *const Object<ResponseStatistics>, _at: u64) {
        object::get(statistics)?.0.lock().end = true;
        Ok(())
    }

    /// `TRITONBACKEND_ModelInstanceResponseStatisticsSetError`.
    fn set_error(statistics: *const Object<ResponseStatistics>, failure: ErrorPointer) {
        object::get(statistics)?;
        if failure.is_null() { Ok(()) } else { object::get(failure.cast_const()).map(drop) }
    }

    /// `TRITONBACKEND_ModelInstanceReportResponseStatistics`.
    fn report_response(statistics: *const Object<ResponseStatistics>) {
        let SetFields { instance, factory, start, end } = *object::get(statistics)?.0.lock();
        let fields = [
            ("model instance", instance),
            ("response factory", factory),
            ("response start", start),
            ("response end", end),
        ];
        match fields.iter().find(|(_, set)| !set) {
            Some((name, _)) => {
                Err(Fault::invalid(format!("the statistics of a response have no {name}")))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_in_the_wrong_order_are_ignored() {
        assert_eq!(Computation::new([1, 2, 3, 4]), Some(Computation { start: 2, end: 3 }));
        assert_eq!(Computation::new([1, 3, 2, 4]), None);
        assert_eq!(Computation::new([0, 0, 0, 0]), Some(Computation { start: 0, end: 0 }));
        let both = Computation { start: 5, end: 9 }.with(Computation { start: 2, end: 7 });
        assert_eq!(both, Computation { start: 2, end: 9 });
    }
}
