//! Tests with the devices of a fake NVML library.

use std::path::Path;

use super::*;
use crate::system::tests::FakeNvml;

const FOUR: &str = "
* devices 4
0 uuid GPU-a
0 memory 1000 400
1 uuid GPU-b
1 memory 1000 10
1 mig 7
1.2 uuid MIG-2
1.2 memory 500 100
1.5 uuid MIG-5
1.5 memory 500 400
2 uuid GPU-c
3 uuid GPU-d
3 mig 7
";

fn devices(fake: &FakeNvml, visible: Option<&str>, limits: &[(u32, f64)]) -> Arc<Devices> {
    let gpus = Arc::new(fake.open().unwrap());
    Devices::new(Some(gpus), visible, limits.iter().copied(), &Roots::new(Path::new("/nowhere")))
}

async fn choose(devices: &Arc<Devices>, number: u32, turn: u32) -> Result<ChosenDevice, String> {
    devices.choose(DeviceRequest { number, turn, loading: true }).await
}

#[tokio::test]
async fn a_process_sees_its_device_first() {
    let fake = FakeNvml::new(FOUR);
    let devices = devices(&fake, None, &[]);
    assert_eq!((devices.usable(), devices.unusable()), (&[0, 1, 2][..], &[3][..]));
    let parts = |chosen: ChosenDevice| (chosen.uuid, chosen.visible, chosen.uuids);
    let first = choose(&devices, 0, 0).await.unwrap();
    assert_eq!(parts(first), ("GPU-a".into(), vec![0, 2], "GPU-a,GPU-c".into()));
    let third = choose(&devices, 2, 5).await.unwrap();
    assert_eq!(parts(third), ("GPU-c".into(), vec![2, 0], "GPU-c,GPU-a".into()));
    for (turn, uuid) in [(0, "MIG-2"), (1, "MIG-5"), (2, "MIG-2")] {
        assert_eq!(
            parts(choose(&devices, 1, turn).await.unwrap()),
            (uuid.into(), vec![1], uuid.into()),
            "{turn}"
        );
    }
}

#[tokio::test]
async fn the_error_for_an_unusable_device_lists_the_usable_ones() {
    let fake = FakeNvml::new(FOUR);
    let devices = devices(&fake, None, &[]);
    let here =
        "GPUs that can be used: 0 (GPU-a), 1 (GPU-b, in MIG mode with MIG-2, MIG-5), 2 (GPU-c)";
    let mig = choose(&devices, 3, 0).await.unwrap_err();
    assert_eq!(mig, format!("GPU 3 (GPU-d) cannot be used: {NO_PARTS}; {here}"));
    assert_eq!(
        choose(&devices, 9, 0).await.unwrap_err(),
        format!("GPU 9 cannot be used: it does not exist; {here}")
    );
    fake.set_devices(&format!("0 all !15\n{}", FOUR.replace("GPU-c", "GPU-x")));
    let lost = choose(&devices, 0, 0).await.unwrap_err();
    assert!(
        lost.starts_with("GPU 0 (GPU-a) cannot be used: ") && lost.contains("1 (GPU-b"),
        "{lost}"
    );
    let other = choose(&devices, 2, 0).await.unwrap_err();
    assert!(
        other.starts_with("GPU 2 (GPU-c) cannot be used: its UUID changed from GPU-c to GPU-x; "),
        "{other}"
    );
    let none = Devices::new(None, None, [], &Roots::new(Path::new("/nowhere")));
    assert_eq!(
        choose(&none, 0, 0).await.unwrap_err(),
        "GPU 0 cannot be used: no GPUs are available"
    );
}

#[tokio::test]
async fn refuses_to_load_a_model_over_the_memory_limit() {
    let fake = FakeNvml::new(FOUR);
    let devices = devices(&fake, None, &[(0, 0.3), (1, 0.5), (2, 0.0), (7, 1.0)]);
    assert_eq!(
        choose(&devices, 0, 0).await.unwrap_err(),
        "memory limit set for GPU 0 has exceeded, model loading is rejected: 400 of 1000 bytes \
         are in use (40.0 %), --model-load-gpu-limit allows 30.0 %"
    );
    // The limit does not apply to a restart.
    assert!(devices.choose(DeviceRequest { number: 0, turn: 0, loading: false }).await.is_ok());
    // A MIG device has separate memory.
    assert!(choose(&devices, 1, 0).await.is_ok());
    assert!(
        choose(&devices, 1, 1).await.unwrap_err().contains("400 of 500 bytes are in use (80.0 %)")
    );
    // A device that does not report its memory is accepted.
    assert!(choose(&devices, 2, 0).await.is_ok());
}

#[tokio::test]
async fn cuda_visible_devices_hides_and_renumbers_devices() {
    let fake = FakeNvml::new(FOUR);
    let hidden = devices(&fake, Some("2"), &[]);
    assert_eq!((hidden.usable(), hidden.unusable()), (&[0][..], &[][..]));
    let chosen = choose(&hidden, 0, 0).await.unwrap();
    assert_eq!((chosen.uuid.as_str(), chosen.visible), ("GPU-c", vec![0]));
    let there = "GPU 2 cannot be used: it does not exist; GPUs that can be used: 0 (GPU-c)";
    assert!(choose(&hidden, 2, 0).await.unwrap_err().contains(there));
    let part = devices(&fake, Some("MIG-5,0,3"), &[]);
    assert_eq!((part.usable(), part.unusable()), (&[0][..], &[][..]));
    assert_eq!(choose(&part, 0, 0).await.unwrap().uuids, "MIG-5");
    let troubled = devices(&fake, Some("3,0"), &[]);
    assert_eq!((troubled.usable(), troubled.unusable()), (&[1][..], &[0][..]));
    // All numbers follow the variable, those of limits and lost devices too.
    let turned = devices(&fake, Some("2,0"), &[(1, 0.1)]);
    let chosen = choose(&turned, 0, 0).await.unwrap();
    assert_eq!((chosen.uuids.as_str(), chosen.visible), ("GPU-c,GPU-a", vec![0, 1]));
    assert!(
        choose(&turned, 1, 0)
            .await
            .unwrap_err()
            .contains("memory limit set for GPU 1 has exceeded")
    );
    assert_eq!([0, 1, 2, 3].map(|bus| turned.number_of(bus)), [Some(1), None, Some(0), None]);
    fake.set_devices(&format!("2 all !15\n{FOUR}"));
    turned.check_watched();
    assert!(turned.lost(0).unwrap().starts_with("GPU 0 (GPU-c) is lost: "));
    fake.set_devices(FOUR);
    assert!(devices(&fake, Some(""), &[]).usable().is_empty());
}

#[tokio::test]
async fn the_memory_of_processes_has_the_numbers_of_visible_devices() {
    let fake = FakeNvml::new(&format!(
        "{FOUR}0 process 1 10\n2 process 1 20\n1.2 process 1 3\n1.5 process 1 4\n"
    ));
    let all = devices(&fake, None, &[]);
    assert_eq!(
        (all.total_memory(0), all.total_memory(2), all.total_memory(9)),
        (Some(1000), None, None)
    );
    assert_eq!(all.uuids().into_values().collect::<Vec<_>>(), ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]);
    let memory = all.process_memory().await;
    assert_eq!([0, 1, 2, 3].map(|gpu| memory.of(gpu, &[1])), [10, 7, 20, 0].map(Some));
    let turned = devices(&fake, Some("2,0"), &[]);
    let memory = turned.process_memory().await;
    assert_eq!([0, 1, 2].map(|gpu| memory.of(gpu, &[1])), [Some(20), Some(10), None]);
    fake.set_devices(&format!("0 process !999\n{FOUR}"));
    assert_eq!([0, 1].map(|gpu| memory.of(gpu, &[1])), [Some(20), Some(10)]);
    assert_eq!(all.process_memory().await.of(0, &[1]), None, "the device cannot be read");
    let none = Devices::new(None, None, [], &Roots::new(Path::new("/nowhere")));
    assert_eq!(none.process_memory().await, ProcessMemory::default());
}

#[tokio::test]
async fn detects_lost_devices_in_use() {
    let fake = FakeNvml::new(FOUR);
    let devices = devices(&fake, None, &[]);
    choose(&devices, 0, 0).await.unwrap();
    fake.set_devices(&format!("0 all !15\n2 all !15\n{FOUR}"));
    devices.check_watched();
    let lost = devices.lost(0).unwrap();
    assert!(lost.starts_with("GPU 0 (GPU-a) is lost: "), "{lost}");
    assert_eq!((devices.lost(1), devices.lost(2)), (None, None), "no instance uses them");
    assert!(choose(&devices, 0, 0).await.is_err());
    fake.set_devices(FOUR);
    // Clears the loss at once, not only at the next check.
    choose(&devices, 0, 0).await.unwrap();
    assert_eq!(devices.lost(0), None);
    // A device that cannot be read for another reason is not lost.
    fake.set_devices(&FOUR.replace("0 memory 1000 400", "0 memory !999"));
    devices.check_watched();
    assert_eq!(devices.lost(0), None);
}

#[tokio::test]
async fn returns_the_processors_near_a_device() {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpu = (0..1024).rev().find(|cpu| allowed.is_set(*cpu)).unwrap();
    let fake = FakeNvml::new(&format!("{FOUR}0 cpus {cpu} 1023\n0 bus 00000000:3B:00.0\n"));
    let devices = devices(&fake, None, &[]);
    assert_eq!(choose(&devices, 0, 0).await.unwrap().cpus, [cpu]);
    assert_eq!(choose(&devices, 2, 0).await.unwrap().cpus, Vec::<usize>::new());
    let gpus = fake.open().unwrap();
    assert_eq!(gpus.usable(0).unwrap().bus.as_deref(), Some("0000:3b:00.0"));
}
