//! The numbers of a load report.

/// The numbers of a load report, by the names of the protobuf fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Values {
    /// The busy fraction of the processors; `None` if it is not measured.
    pub cpu_utilization: Option<f64>,
    /// The used fraction of the memory, 0 to 1; `None` if it is not measured.
    pub mem_utilization: Option<f64>,
    /// The utilization of the busiest model's instances. More than 1 means that requests wait.
    /// `None` if it is not known yet.
    pub application_utilization: Option<f64>,
    /// Answered inference requests per second; `None` if it is not known yet.
    pub rps_fractional: Option<f64>,
    /// Requests per second that failed through the server's fault; `None` if it is not known yet.
    pub eps: Option<f64>,
    /// The metrics of a model.
    pub named_metrics: Vec<(&'static str, f64)>,
}
