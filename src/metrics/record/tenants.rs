//! What tenants use of a model. Each function belongs to an event of [`record`](super): call it with the same request.

use super::Failure;
use crate::series::ModelSeries;
use crate::tenants::Usage;
use pharos_base::error::Reason;
use pharos_base::id::TenantId;
use pharos_base::timeline::Timeline;

/// Charges a successful request to its tenant. Call it where the request counts as done or as a hit of the response cache.
pub fn tenant_served(series: &ModelSeries, tenant: TenantId, timeline: &Timeline) {
    let timeline = *timeline;
    charge(series, tenant, move |usage| {
        executed(usage, &timeline);
        usage.succeeded();
    });
}

/// Charges one execution of a request that will be executed again.
pub fn tenant_rescheduled(series: &ModelSeries, tenant: TenantId, timeline: &Timeline) {
    let timeline = *timeline;
    charge(series, tenant, move |usage| executed(usage, &timeline));
}

fn executed(usage: &Usage, timeline: &Timeline) {
    let (input, infer, output) = timeline.compute.durations_ns();
    usage.executed(timeline.queue_ns(), input.saturating_add(infer).saturating_add(output));
}

/// Counts a failed request of a tenant, if the model counts it as failed.
pub fn tenant_failed(series: &ModelSeries, tenant: TenantId, reason: Reason) {
    charge(series, tenant, move |usage| {
        if Failure::of(reason).is_some() {
            usage.failed();
        }
    });
}

/// Changes what a tenant has used of a model; does nothing if tenants are not distinguished.
#[inline]
fn charge(series: &ModelSeries, tenant: TenantId, change: impl FnOnce(&Usage) + Send + 'static) {
    if series.cells.tenants.is_off() {
        return;
    }
    series.record(move |series| {
        if let Some(usage) = series.cells.tenants.of(tenant) {
            change(usage);
        }
    });
}
