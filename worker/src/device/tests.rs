//! Streams and buffers, and their cleanup, over the fake driver.

use super::fake::{Fake, GARBAGE};
use super::work::CopySource;
use super::*;

fn cuda(fake: &Fake) -> Arc<Cuda> {
    Cuda::with(Box::new(fake.clone()), None)
}

struct Owned(Vec<u8>);

impl CopySource for Owned {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

#[test]
fn abandoned_work_is_waited_for() {
    let fake = Fake::new(1);
    let queues = Queues::new(&cuda(&fake)).unwrap();
    let mut pool = Pool::new(cuda(&fake));
    let buffer = pool.take(3).unwrap();
    let mut into = [0; 3];
    let mut work = queues.begin().unwrap();
    work.upload(b"abc", buffer.first(3)).unwrap();
    work.inputs_follow_no_more().unwrap();
    work.computed().unwrap();
    work.download(buffer.first(3), &mut into).unwrap();
    assert!(!fake.is_idle());
    drop(work);
    assert!(fake.is_idle() && &into == b"abc");
    // Before the wait, the download contains garbage: other tests rely on this.
    let mut work = queues.begin().unwrap();
    work.download(buffer.first(3), &mut into).unwrap();
    fake.fail("wait_here", 0, Fault::Permanent("lost".into()));
    assert_eq!(work.finish(), Err(Fault::Permanent("lost".into())));
    assert_eq!(into, [GARBAGE; 3]);
}

#[test]
#[should_panic(expected = "memory is used while another stream")]
fn the_fake_driver_detects_a_stream_that_does_not_wait() {
    let fake = Fake::new(1);
    let queues = Queues::new(&cuda(&fake)).unwrap();
    let mut pool = Pool::new(cuda(&fake));
    let buffer = pool.take(3).unwrap();
    let mut into = [0; 3];
    let mut work = queues.begin().unwrap();
    work.upload(b"abc", buffer.first(3)).unwrap();
    let _ = work.download(buffer.first(3), &mut into);
}

#[test]
fn copies_that_do_not_fit_are_refused() {
    let fake = Fake::new(2);
    let queues = Queues::new(&cuda(&fake)).unwrap();
    let mut pool = Pool::new(cuda(&fake));
    let buffer = pool.take(100).unwrap();
    let mut into = [0; 3];
    let mut work = queues.begin().unwrap();
    let elsewhere = DeviceMemory::new(1, 1 << 41, 3);
    assert!(
        work.upload(b"abc", buffer.first(4)).is_err() && work.upload(b"abc", elsewhere).is_err()
    );
    assert!(
        work.bring(buffer.first(4), buffer.first(3)).is_err()
            && work.send(elsewhere, buffer.first(4)).is_err()
    );
    assert!(work.download(elsewhere, &mut into).is_err());
    drop(work);
    let too_small = Owned(vec![0; 1 << 20]);
    assert!(queues.ahead(Box::new(too_small), buffer).is_err());
    assert_eq!(fake.count("upload") + fake.count("download") + fake.count("copy"), 0);
    assert!(elsewhere.part(1, 3).is_none() && elsewhere.part(usize::MAX, 2).is_none());
    assert_eq!(elsewhere.part(1, 2), Some(DeviceMemory::new(1, (1 << 41) + 1, 2)));
    assert!(
        !is_usable(elsewhere, 1)
            && is_usable(DeviceMemory::new(0, 6, 8), 2)
            && !is_usable(DeviceMemory::new(0, 6, 8), 4)
    );
}

#[test]
fn a_failure_of_a_framework_may_have_broken_the_device() {
    let fake = Fake::new(1);
    let cuda = Cuda::with(Box::new(fake.clone()), Some(Device::default()));
    cuda.check_after_failure(true);
    assert_eq!((fake.count("event"), cuda.broken()), (0, None), "the device is not in use");
    fake.activate();
    cuda.check_after_failure(true);
    assert_eq!(
        (fake.count("event"), fake.handles(), cuda.broken()),
        (1, 0, None),
        "an ordinary failure"
    );
    fake.fail("event", 0, Fault::Permanent("an illegal address".into()));
    cuda.check_after_failure(true);
    assert!(cuda.broken().unwrap().contains("an illegal address"));
    let on_processors = Cuda::with(Box::new(Fake::absent()), None);
    on_processors.check_after_failure(true);
    assert_eq!(on_processors.broken(), None);
}

#[test]
fn buffers_are_reused_for_similar_sizes() {
    let fake = Fake::new(1);
    let mut pool = Pool::new(cuda(&fake));
    let small = pool.take(1).unwrap();
    let large = pool.take(100_000).unwrap();
    assert_eq!(
        (small.first(usize::MAX).len(), large.first(usize::MAX).len()),
        (64 << 10, 128 << 10)
    );
    let address = small.first(0).address();
    pool.put(large);
    pool.put(small);
    assert_eq!(pool.take(1000).unwrap().first(0).address(), address);
    assert_eq!(fake.count("allocate"), 2);
    // When little memory is left, allocates only the requested size.
    fake.fail("allocate", 0, Fault::Refused("out of memory".into()));
    assert_eq!(pool.take(200_000).unwrap().first(usize::MAX).len(), 200_000);
    drop(pool);
    assert_eq!(fake.buffers(), 0);
}

#[test]
fn unused_copies_ahead_are_waited_for() {
    let fake = Fake::new(1);
    let queues = Queues::new(&cuda(&fake)).unwrap();
    let mut pool = Pool::new(cuda(&fake));
    let ahead = queues.ahead(Box::new(Owned(b"abc".to_vec())), pool.take(3).unwrap()).unwrap();
    assert!(!ahead.is_of(b"abc"));
    drop(ahead);
    assert_eq!((fake.count("synchronize"), fake.buffers()), (1, 0));
    let ahead = queues.ahead(Box::new(Owned(b"abc".to_vec())), pool.take(3).unwrap()).unwrap();
    assert!(ahead.into_buffer().is_some());
    assert_eq!(fake.count("synchronize"), 1);
}
