//! The device files of NVIDIA's GPUs.
//!
//! The system need not create them at its start. NVIDIA's libraries create missing files, and load
//! the kernel modules, with the program `nvidia-modprobe`, which has the set-user-ID bit. A process
//! that can gain no rights by the bit, and workers in a sandbox, find the files only if they exist
//! before.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// PCI's number of the vendor NVIDIA.
const NVIDIA: &str = "0x10de";

/// The start of the PCI classes of display controllers, to which all GPUs belong.
const DISPLAY: &str = "0x03";

/// The device file that all programs with CUDA or NVML open, and its minor number.
const CONTROL: (&str, u32) = ("nvidiactl", 255);

/// The device file of unified memory, without which CUDA does not start.
const UNIFIED_MEMORY: &str = "nvidia-uvm";

/// The time limit of a run of the program, which may load kernel modules: `WAITS` pauses of `WAIT`.
const WAITS: u32 = 3000;
const WAIT: Duration = Duration::from_millis(10);

/// The paths of the system.
struct System {
    /// Devices on the PCI bus.
    bus: PathBuf,
    /// The GPUs that the driver has found.
    gpus: PathBuf,
    /// Device files.
    devices: PathBuf,
    /// NVIDIA's program.
    program: PathBuf,
}

impl Default for System {
    fn default() -> Self {
        Self {
            bus: "/sys/bus/pci/devices".into(),
            gpus: "/proc/driver/nvidia/gpus".into(),
            devices: "/dev".into(),
            program: "/usr/bin/nvidia-modprobe".into(),
        }
    }
}

/// Creates missing device files, if there are GPUs and NVIDIA's program, and waits for the program.
/// Call it while this process can gain rights.
pub fn create_device_files() {
    System::default().create();
}

/// Returns whether this machine or container has NVIDIA's driver.
pub(super) fn has_driver() -> bool {
    System::default().has_driver()
}

/// Returns why CUDA will not start although NVIDIA's driver runs, as a sentence; `None` without a
/// known reason.
pub(super) fn gap() -> Option<String> {
    System::default().gap()
}

impl System {
    fn create(&self) {
        if !self.program.is_file() || !self.has_gpus() {
            return;
        }
        let (control, number) = CONTROL;
        if self.lacks(control) {
            // Also loads the kernel module, which finds the GPUs.
            self.run(&[format!("-c={number}")]);
        }
        let missing: Vec<String> = self
            .numbers()
            .into_iter()
            .filter(|number| self.lacks(&format!("nvidia{number}")))
            .map(|number| format!("-c={number}"))
            .collect();
        if !missing.is_empty() {
            self.run(&missing);
        }
        if self.lacks(UNIFIED_MEMORY) {
            self.run(&["-u".to_owned(), "-c=0".to_owned()]);
        }
    }

    fn has_driver(&self) -> bool {
        !self.lacks(CONTROL.0)
    }

    fn gap(&self) -> Option<String> {
        let is_gap = self.has_driver() && self.lacks(UNIFIED_MEMORY);
        let path = self.devices.join(UNIFIED_MEMORY);
        is_gap.then(|| {
            format!(
                "CUDA needs '{}', which does not exist: `nvidia-modprobe -u -c=0` creates it as \
                 root",
                path.display()
            )
        })
    }

    fn has_gpus(&self) -> bool {
        let starts = |file: PathBuf, start: &str| {
            fs::read_to_string(file).is_ok_and(|text| text.starts_with(start))
        };
        entries(&self.bus).iter().any(|device| {
            starts(device.join("vendor"), NVIDIA) && starts(device.join("class"), DISPLAY)
        })
    }

    /// Returns the minor numbers of the GPUs that the driver has found.
    fn numbers(&self) -> Vec<u32> {
        let mut numbers = Vec::new();
        for gpu in entries(&self.gpus) {
            let text = fs::read_to_string(gpu.join("information")).unwrap_or_default();
            let minor = text
                .lines()
                .find_map(|line| line.strip_prefix("Device Minor:")?.trim().parse::<u32>().ok());
            numbers.extend(minor);
        }
        numbers.sort_unstable();
        numbers
    }

    fn lacks(&self, device: &str) -> bool {
        !self.devices.join(device).exists()
    }

    /// Runs the program. If it fails, NVIDIA's libraries report what is missing.
    fn run(&self, arguments: &[String]) {
        let mut command = Command::new(&self.program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let Ok(mut process) = command.spawn() else { return };
        for _ in 0..WAITS {
            if !matches!(process.try_wait(), Ok(None)) {
                return;
            }
            sleep(WAIT);
        }
        // It hangs in the driver. Without a wait, it remains until this process ends.
        let _ = process.kill();
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::system::tests::Tree;

    /// A system whose program writes its arguments to a file, and creates the control file.
    struct Machine {
        tree: Tree,
        system: System,
    }

    impl Machine {
        fn new() -> Self {
            let tree = Tree::new();
            tree.write("dev/null", "");
            tree.write(
                "program",
                "#!/bin/sh\necho \"$@\" >>\"${0%/*}/log\"\n: >\"${0%/*}/dev/nvidiactl\"\n",
            );
            let bus = tree.path("bus");
            let gpus = tree.path("gpus");
            let system =
                System { bus, gpus, devices: tree.path("dev"), program: tree.path("program") };
            fs::set_permissions(&system.program, fs::Permissions::from_mode(0o755)).unwrap();
            Self { tree, system }
        }

        /// Puts a device on the bus.
        fn plug(&self, place: &str, vendor: &str, class: &str) {
            self.tree.write(&format!("bus/{place}/vendor"), vendor);
            self.tree.write(&format!("bus/{place}/class"), class);
        }

        /// Returns the arguments of each run of the program.
        fn runs(&self) -> Vec<String> {
            self.system.create();
            let log = self.tree.path("log");
            let text = fs::read_to_string(&log).unwrap_or_default();
            let _ = fs::remove_file(log);
            text.lines().map(str::to_owned).collect()
        }
    }

    #[test]
    fn missing_device_files_of_gpus_are_created() {
        let machine = Machine::new();
        machine.plug("0000:3b:00.0", "0x10de\n", "0x030200\n");
        for (place, minor) in [("0000:3b:00.0", 0), ("0000:af:00.0", 1)] {
            let text =
                format!("Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-1\nDevice Minor: \t {minor}\n");
            machine.tree.write(&format!("gpus/{place}/information"), &text);
        }
        assert_eq!((machine.system.has_driver(), machine.system.gap()), (false, None));
        assert_eq!(machine.runs(), ["-c=255", "-c=0 -c=1", "-u -c=0"]);
        machine.tree.write("dev/nvidia0", "");
        assert_eq!(machine.runs(), ["-c=1", "-u -c=0"]);
        machine.tree.write("dev/nvidia1", "");
        assert!(machine.system.has_driver());
        let gap = machine.system.gap().unwrap();
        assert!(
            gap.contains(
                "/nvidia-uvm', which does not exist: `nvidia-modprobe -u -c=0` creates it"
            ),
            "{gap}"
        );
        machine.tree.write("dev/nvidia-uvm", "");
        assert_eq!((machine.runs(), machine.system.gap()), (Vec::new(), None));
    }

    #[test]
    fn nothing_is_done_without_gpus_or_without_the_program() {
        let machine = Machine::new();
        machine.plug("0000:00:1f.0", "0x8086\n", "0x030000\n");
        machine.plug("0000:01:00.1", "0x10de\n", "0x040300\n");
        assert_eq!(
            machine.runs(),
            Vec::<String>::new(),
            "another vendor's GPU, and a sound device"
        );
        machine.plug("0000:01:00.0", "0x10de\n", "0x030000\n");
        assert_eq!(machine.runs(), ["-c=255", "-u -c=0"]);
        fs::remove_file(&machine.system.program).unwrap();
        assert_eq!(machine.runs(), Vec::<String>::new());
    }
}
