//! The times that a backend reports. They are the truth for the statistics of a batch: where the
//! inputs end and the outputs begin inside the time that the server measures.

use parking_lot::Mutex;

use crate::computation::Computation;
use crate::error::{ErrorPointer, interface};
use crate::fault::Fault;
use crate::model::InstanceObject;
use crate::object::{self, Object, kinds};
use crate::request::Request;
use crate::response::Factory;

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
        instance.reports.request(computation);
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
            instance.reports.batch(computation);
        }
        Ok(())
    }

    /// `TRITONBACKEND_ModelInstanceResponseStatisticsNew`.
    fn response_new(statistics: *mut *mut Object<ResponseStatistics>) {
        object::give(statistics, ResponseStatistics::default())
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
