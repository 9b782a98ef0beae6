//! Tests with fake system files and a fake NVML library (`tests/fake_nvml`).

use std::fs;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

use super::gpu::GpuMemory;
use super::*;

/// Files of a test in a temporary directory.
pub(super) struct Tree(TempDir);

impl Tree {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(super) fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

pub(super) fn at_ms(ms: u64) -> Instant {
    Instant(ms * 1_000_000)
}

/// A fake NVML library of one test; a file next to it describes its devices.
pub(super) struct FakeNvml(Tree);

impl FakeNvml {
    pub(super) fn new(devices: &str) -> Self {
        static BUILT: OnceLock<Vec<u8>> = OnceLock::new();
        let library = BUILT.get_or_init(|| {
            let tree = Tree::new();
            let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake_nvml/nvml.c");
            let built = tree.path("built.so");
            let status = Command::new("cc")
                .args(["-shared", "-fPIC", "-o"])
                .arg(&built)
                .arg(source)
                .status();
            assert!(
                status.unwrap().success(),
                "cannot build the library: is a C compiler installed?"
            );
            fs::read(built).unwrap()
        });
        let tree = Tree::new();
        fs::write(tree.path("libfake.so"), library).unwrap();
        let fake = Self(tree);
        fake.set_devices(devices);
        fake
    }

    /// Changes the devices.
    pub(super) fn set_devices(&self, devices: &str) {
        self.0.write("libfake.so.devices", devices);
    }

    pub(super) fn open_from(&self, minimum: Capability) -> Result<Gpus, String> {
        Gpus::open(Some(&self.0.path("libfake.so")), minimum)
    }

    pub(super) fn open(&self) -> Result<Gpus, String> {
        self.open_from(Capability::default())
    }
}

const TWO: &str = "
* devices 2
* driver 550.54.15
0 uuid GPU-0
0 utilization 37 12
0 memory 1000 400
0 power 250500
0 power_limit 400000
0 energy 5500
0 temperature 55
0 process 1234 300
0 process 1235 50
0 process 1234 7
0 kernels 1234 40 1000
0 kernels 1234 20 1100
0 kernels 77 5 1050
0 kernels 78 4000000000 1050
1 uuid GPU-1
1 mig 7
1 utilization !3
1 memory 2000 1200
1 power 90000
1 power_limit !3
1 energy !4
1 temperature 41
1 process 1234 600
1.0 uuid MIG-0
1.0 memory 900 600
1.0 process 1234 600
1.2 uuid MIG-2
1.2 memory !4
";

fn sampler(gpus: Gpus) -> Sampler {
    let gpus = Some(Arc::new(gpus));
    let interval = Duration::from_secs(2);
    let log_interval = Duration::from_secs(60);
    Sampler::new(&Settings {
        interval,
        log_interval,
        cpu: false,
        gpus,
        roots: Roots::new(Path::new("/nowhere")),
    })
}

fn worker(instance: &str, pid: u32) -> (Worker, Option<u32>) {
    (Worker { model: ModelVersion::new("m", 1), instance: instance.to_owned() }, Some(pid))
}

#[test]
fn reads_the_values_that_devices_report() {
    let fake = FakeNvml::new(TWO);
    let gpus = fake.open().unwrap();
    assert_eq!(gpus.describe(), "2 (driver 550.54.15)");
    let readings = sampler(gpus).sample(at_ms(0), &[]).gpus;
    let first = GpuReading {
        uuid: "GPU-0".to_owned(),
        utilization: Some(0.37),
        bandwidth: Some(0.12),
        memory: Some(GpuMemory { total: 1000, used: 400 }),
        power: Some(250.5),
        power_limit: Some(400.0),
        energy: Some(5.5),
        temperature: Some(55.0),
        processes: vec![(1234, 300), (1235, 50), (1234, 7)],
        kernels: Some(vec![(77, 0.05), (1234, 0.3), (1235, 0.0)]),
        ..GpuReading::default()
    };
    assert_eq!(readings[0], first);
    let mig = GpuReading {
        index: 1,
        uuid: "GPU-1".to_owned(),
        memory: Some(GpuMemory { total: 2000, used: 1200 }),
        power: Some(90.0),
        temperature: Some(41.0),
        ..GpuReading::default()
    };
    assert_eq!(readings[1], mig, "only unsupported and forbidden values are left out");
    let part = GpuReading {
        index: 1,
        mig: true,
        uuid: "MIG-0".to_owned(),
        memory: Some(GpuMemory { total: 900, used: 600 }),
        processes: vec![(1234, 600)],
        ..GpuReading::default()
    };
    assert_eq!(readings[2], part);
    assert_eq!((readings[3].uuid.as_str(), readings[3].memory, readings.len()), ("MIG-2", None, 4));
}

#[test]
fn sums_the_memory_of_processes_by_device() {
    let fake = FakeNvml::new(TWO);
    let gpus = fake.open().unwrap();
    let memory = ProcessMemory::new(gpus.processes());
    assert_eq!([0, 1, 2].map(|gpu| memory.of(gpu, &[1234])), [Some(307), Some(600), None]);
    assert_eq!([0, 1].map(|gpu| memory.of(gpu, &[1234, 1235])), [Some(357), Some(600)]);
    let readings = sampler(gpus)
        .sample(at_ms(0), &[worker("m_0", 1235), worker("m_1", 1234), worker("m_2", 9)]);
    let found = readings
        .worker_gpus
        .iter()
        .map(|of| (of.worker.instance.as_str(), of.uuid.as_str(), of.bytes));
    assert_eq!(
        found.collect::<Vec<_>>(),
        [("m_0", "GPU-0", Some(50)), ("m_1", "GPU-0", Some(307)), ("m_1", "MIG-0", Some(600))]
    );
}

#[test]
fn averages_process_utilization_since_the_last_reading() {
    const ONE: &str = "* devices 1\n0 uuid GPU-0\n";
    let fake = FakeNvml::new(ONE);
    let mut sampler = sampler(fake.open().unwrap());
    let workers = [worker("m_0", 10), worker("m_1", 11), worker("m_2", 12)];
    let mut shares = |devices: &str| {
        fake.set_devices(&format!("{ONE}{devices}"));
        let readings = sampler.sample(at_ms(0), &workers);
        let found = readings
            .worker_gpus
            .into_iter()
            .map(|of| (of.worker.instance, of.bytes, of.utilization));
        found
            .map(|(instance, bytes, share)| format!("{instance} {bytes:?} {share:?}"))
            .collect::<Vec<_>>()
    };
    let processes = "0 process 10 300\n0 process 11 200\n";
    let samples =
        "0 kernels 10 50 100\n0 kernels 10 100 200\n0 kernels 12 10 200\n0 kernels 99 1 150\n";
    let idle = ["m_0 Some(300) Some(0.0)", "m_1 Some(200) Some(0.0)"];
    // No process has been active so far.
    assert_eq!(shares(&format!("{processes}0 kernels !6\n")), idle);
    // Samples are averaged. A process without samples was idle; one with samples counts even if the
    // driver does not list it.
    let busy = ["m_0 Some(300) Some(0.75)", "m_1 Some(200) Some(0.0)", "m_2 None Some(0.1)"];
    assert_eq!(shares(&format!("{processes}{samples}")), busy);
    // Each sample counts once.
    assert_eq!(shares(&format!("{processes}{samples}")), idle);
    let later = format!("{processes}{samples}0 kernels 11 30 300\n");
    assert_eq!(shares(&later), ["m_0 Some(300) Some(0.0)", "m_1 Some(200) Some(0.3)"]);
    // If the device or its driver does not support it, only this value is missing.
    for silent in ["", "0 kernels !3\n", "0 kernels !2\n", "0 kernels !13\n", "0 kernels !999\n"] {
        let without = ["m_0 Some(300) None", "m_1 Some(200) None"];
        assert_eq!(shares(&format!("{processes}{silent}")), without, "{silent}");
    }
    assert!(sampler.lost.is_empty(), "the device is not reported as lost");
}

#[test]
fn a_failed_device_loses_only_its_readings() {
    let fake = FakeNvml::new(TWO);
    let mut sampler = sampler(fake.open().unwrap());
    let mut uuids = |devices: &str| {
        fake.set_devices(devices);
        sampler.sample(at_ms(0), &[]).gpus.into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>()
    };
    assert_eq!(uuids(TWO).len(), 4);
    for lost in ["0 all !15\n", "0 uuid !999\n", "0 temperature !15\n"] {
        assert_eq!(uuids(&format!("{lost}{TWO}")), ["GPU-1", "MIG-0", "MIG-2"], "{lost}");
    }
    assert_eq!(uuids(TWO).len(), 4, "the device responds again");
    assert_eq!(
        uuids(&format!("0 temperature !999\n{TWO}"))[0],
        "GPU-0",
        "one failed value is left out"
    );
    assert_eq!(uuids("* devices !999\n"), [""; 0]);
    assert_eq!(uuids(TWO).len(), 4);
}

#[test]
fn a_device_without_readable_values_is_lost() {
    let fake = FakeNvml::new("* devices 1\n0 uuid GPU-0\n0 temperature !999\n0 process !999\n");
    let read = fake.open().unwrap().read(&mut LastSamples::new()).unwrap();
    assert!(read[0].1.as_ref().is_err_and(|reason| !reason.is_empty()), "{read:?}");
    fake.set_devices("* devices 1\n0 uuid GPU-0\n0 process !4\n");
    let read = fake.open().unwrap().read(&mut LastSamples::new()).unwrap();
    assert_eq!(
        read[0].1.as_ref().unwrap()[0].uuid,
        "GPU-0",
        "unsupported values do not mean that it is lost"
    );
}

#[test]
fn the_error_for_an_unusable_library_has_the_reason() {
    let reason =
        Gpus::open(Some(Path::new("/nonexistent/libnvidia-ml.so.1")), Capability::default())
            .unwrap_err();
    assert!(reason.contains("/nonexistent/libnvidia-ml.so.1"), "{reason}");
    let reason = FakeNvml::new("* init !9\n").open().unwrap_err();
    assert!(reason.contains("driver"), "{reason}");
}

#[test]
fn a_complete_reading_is_fast() {
    let roots = Roots::new(Path::new("/sys/fs/cgroup"));
    let interval = Duration::from_secs(2);
    let log_interval = Duration::from_secs(60);
    let mut sampler =
        Sampler::new(&Settings { interval, log_interval, cpu: true, gpus: None, roots });
    let workers: Vec<_> = (0..8).map(|n| worker(&format!("m_{n}"), std::process::id())).collect();
    let first = sampler.sample(pharos_os::clock::now(), &workers);
    assert!(first.host.is_some() && first.process.is_some() && first.workers.len() == 8);
    let began = pharos_os::clock::now();
    for _ in 0..100 {
        sampler.sample(pharos_os::clock::now(), &workers);
    }
    let each = (pharos_os::clock::now() - began) / 100;
    println!("one reading of this machine and 8 processes: {each:?}");
    assert!(each < Duration::from_millis(20), "{each:?}");
}

/// Waits until `holds`; fails after ten seconds.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let began = pharos_os::clock::now();
    while !holds() {
        assert!(
            pharos_os::clock::now() - began < Duration::from_secs(10),
            "timed out waiting for: {what}"
        );
        std::thread::yield_now();
    }
}

#[test]
fn polling_fills_the_cache_until_it_is_dropped() {
    use pharos::metrics::builtin::Builtin;
    use pharos::metrics::cache::{self, Cache};
    use pharos::metrics::catalog::Catalog;
    let cache = Arc::new(Cache::new(Catalog::shipped(), cache::Settings::new("box")));
    let asked = Arc::new(AtomicU32::new(0));
    let workers = {
        let asked = asked.clone();
        move || {
            asked.fetch_add(1, Ordering::Relaxed);
            Vec::new()
        }
    };
    let roots = Roots::new(Path::new("/sys/fs/cgroup"));
    let interval = Duration::from_millis(10);
    let log_interval = Duration::from_secs(60);
    let fake = FakeNvml::new(TWO);
    let gpus = Some(Arc::new(fake.open().unwrap()));
    let settings = Settings { interval, log_interval, cpu: true, gpus, roots };
    let latest = Latest::default();
    let polling =
        Polling::start(settings.clone(), cache.clone(), latest.clone(), workers.clone()).unwrap();
    eventually("several readings", || asked.load(Ordering::Relaxed) >= 5);
    assert!(cache.gauge(Builtin::CpuMemoryTotal.name(), &[]).unwrap().value() > 0.0);
    assert_eq!(latest.gpus.of(0, pharos_os::clock::now()).unwrap().utilization, Some(0.37));
    drop(polling);
    eventually("the thread's end", || Arc::strong_count(&asked) == 2);
    let nothing = Settings { cpu: false, gpus: None, ..settings };
    assert!(
        Polling::start(nothing, cache, latest, workers).unwrap().is_none(),
        "no thread without readings"
    );
}

#[tokio::test]
async fn finds_gpus_only_with_a_library() {
    let fake = FakeNvml::new(TWO);
    assert!(find_gpus(Some(fake.0.path("libfake.so")), Capability::default()).await.is_some());
    assert!(
        find_gpus(Some(PathBuf::from("/nonexistent.so")), Capability::default()).await.is_none()
    );
}

#[test]
fn refuses_gpus_below_the_minimum_compute_capability() {
    let fake = FakeNvml::new(&format!("{TWO}\n0 capability 75\n1 capability 90\n"));
    let error = |major, minor| {
        let gpus = fake.open_from(Capability { major, minor }).unwrap();
        gpus.found().iter().map(|found| found.error.clone().unwrap_or_default()).collect::<Vec<_>>()
    };
    assert_eq!(error(7, 5), ["", ""]);
    let below = "its compute capability is 7.5, below --min-supported-compute-capability=8.0";
    assert_eq!(error(8, 0), [below, ""]);
    let gpus = fake.open_from(Capability { major: 8, minor: 0 }).unwrap();
    assert_eq!(gpus.usable(0).unwrap_err(), below, "also for an instance that names its number");
}
