//! Host policies: which processors the instances of a group run on.

use clap::Args;

use super::WORKERS;
use pharos_telemetry::system::{HostPolicy, Processors, cores};

/// The processors of instances.
#[derive(Clone, Debug, Args)]
pub struct HostPolicies {
    /// Where the instances run whose instance_group has this host_policy: NAME,cpu-cores=LIST (such as 0-3,8) or
    /// NAME,numa-node=N (its processors); cpu-cores wins. Groups that name no policy have cpu, gpu_N (N: the GPU) or model. May
    /// be given several times, or several separated by ';'
    #[arg(id = "host-policy", long = "host-policy", value_name = "NAME,SETTING=VALUE", env = "PHAROS_HOST_POLICY", value_parser = setting, value_delimiter = ';', help_heading = WORKERS)]
    pub policies: Vec<HostPolicy>,
}

/// Reads one `--host-policy`.
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
