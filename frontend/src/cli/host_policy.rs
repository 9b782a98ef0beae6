//! Host policies: which processors the instances of a group run on.

use clap::Args;

use super::WORKERS;

/// The processors of instances.
#[derive(Clone, Debug, Args)]
pub struct HostPolicies {
    /// Where the instances run whose instance_group has this host_policy: NAME,cpu-cores=LIST (such as 0-3,8) or
    /// NAME,numa-node=N (its processors); cpu-cores wins. Groups that name no policy have cpu, gpu_N (N: the GPU) or model. May
    /// be given several times, or several separated by ';'
    #[arg(id = "host-policy", long = "host-policy", value_name = "NAME,SETTING=VALUE", env = "PHAROS_HOST_POLICY", value_parser = setting, value_delimiter = ';', help_heading = WORKERS)]
    pub policies: Vec<HostPolicy>,
}

/// One `--host-policy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPolicy {
    /// The policy's name.
    pub name: String,
    /// The processors that it allows.
    pub processors: Processors,
}

/// The processors of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Processors {
    /// Those of a NUMA node.
    Node(u32),
    /// These.
    Cores(Vec<usize>),
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

/// The numbers of a list such as `0-3,8`; a process can be bound to 1024 processors.
pub fn cores(list: &str) -> Option<Vec<usize>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse().ok()?);
        (first <= last && last < 1024).then_some(first..=last)
    };
    list.split(',').map(range).collect::<Option<Vec<_>>>().map(|ranges| ranges.into_iter().flatten().collect())
}
