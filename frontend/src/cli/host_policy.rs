//! Host policies: the CPU affinity of instance groups.

use clap::Args;

use super::WORKERS;
use pharos_telemetry::system::{HostPolicy, Processors, cores};

/// The CPU affinity of instances.
#[derive(Clone, Debug, Args)]
pub struct HostPolicies {
    /// Cores for the instances of each instance_group with this host_policy: NAME,cpu-cores=LIST (for example 0-3,8) or
    /// NAME,numa-node=N (the cores of that node); cpu-cores takes precedence. Groups without host_policy have the policy cpu,
    /// gpu_N (N: the GPU) or model. May be repeated, or given as a list separated by ';'
    #[arg(id = "host-policy", long = "host-policy", value_name = "NAME,SETTING=VALUE", env = "PHAROS_HOST_POLICY", value_parser = setting, value_delimiter = ';', help_heading = WORKERS)]
    pub policies: Vec<HostPolicy>,
}

/// Parses one `--host-policy`.
fn setting(text: &str) -> Result<HostPolicy, String> {
    let form = "expected NAME,cpu-cores=LIST or NAME,numa-node=N, for example cpu,cpu-cores=0-3,8";
    let (name, setting) = text.split_once(',').filter(|(name, _)| !name.is_empty()).ok_or(form)?;
    let setting = match setting.split_once('=').ok_or(form)? {
        ("numa-node", node) => Processors::Node(node.parse().map_err(|_| form)?),
        ("cpu-cores", list) => Processors::Cores(cores(list).ok_or(form)?),
        (other, _) => return Err(format!("unknown setting '{other}': {form}")),
    };
    Ok(HostPolicy { name: name.to_owned(), processors: setting })
}
