//! Simulated processes that the real supervision starts, ends and watches.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::pin::Pin;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pharos::timeline::Instant;
use pharos::wire::{Loaded, ToFrontend};
use tokio::sync::watch;

use super::super::worker::Worker;
use super::super::world::Random;
use crate::launch::Launch;
use crate::process::{self, Printed, ProcessPlacement, StartWorkers, WorkerProcess};
use crate::wire::worker_end;
use pharos_os::clock;
use pharos_os::event_loops::EventLoop;

/// The first process id: no process of Linux has so large an id.
const FIRST_PID: u32 = 1 << 30;

/// The number of SIGKILL.
const KILL: i32 = 9;

/// How probable faults of processes are: one in so many, 0 for never.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// A process cannot be started.
    pub(super) start: u64,
    /// It cannot load its model, or dies during the load.
    pub(super) load: u64,
    /// It dies instead of executing a batch.
    pub(super) die: u64,
    /// A request fails.
    pub(super) fail: u64,
    /// It does not stop when the server says so.
    pub(super) stay: u64,
}

/// What a process does at a time.
#[derive(Clone, Copy, Debug)]
enum ProcessEvent {
    Load,
    FailToLoad,
    Execute,
    /// It ends with a status, as `waitpid` reports it.
    End(i32),
}

/// A process that has not ended.
struct Process {
    worker: Worker<()>,
    executes: bool,
    ended: watch::Sender<Option<ExitStatus>>,
}

/// What was seen, to show what a simulation covers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProcessCounts {
    pub(super) started: u64,
    pub(super) not_started: u64,
    pub(super) loaded: u64,
    pub(super) not_loaded: u64,
    pub(super) executed: u64,
    pub(super) died: u64,
}

impl ProcessCounts {
    /// Adds what was seen of others.
    pub(super) fn add(&mut self, other: &Self) {
        self.started += other.started;
        self.not_started += other.not_started;
        self.loaded += other.loaded;
        self.not_loaded += other.not_loaded;
        self.executed += other.executed;
        self.died += other.died;
    }
}

struct State {
    random: Random,
    faults: Faults,
    seen: ProcessCounts,
    next_pid: u32,
    living: BTreeMap<u32, Process>,
    /// Events of processes, by time and the order of planning.
    plans: BTreeMap<(Instant, u64), (u32, ProcessEvent)>,
    next_plan: u64,
}

/// All processes.
pub(super) struct Processes(Mutex<State>);

impl Processes {
    pub(super) fn new(random: Random, faults: Faults) -> Arc<Self> {
        let (seen, living, plans) = Default::default();
        let state =
            State { random, faults, seen, next_pid: FIRST_PID, living, plans, next_plan: 0 };
        Arc::new(Self(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Ends all faults.
    pub(super) fn end_faults(&self) {
        self.lock().faults = Faults::default();
    }

    /// Returns the number of processes that have not ended.
    pub(super) fn living(&self) -> usize {
        self.lock().living.len()
    }

    pub(super) fn seen(&self) -> ProcessCounts {
        self.lock().seen
    }

    /// Returns when a process does something next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.lock().plans.keys().next().map(|(at, _)| *at)
    }

    /// Lets all processes read what was sent to them. Returns whether anything was.
    pub(super) fn read(&self) -> bool {
        let mut state = self.lock();
        let pids: Vec<u32> = state.living.keys().copied().collect();
        let mut any = false;
        for pid in pids {
            any |= state.read(pid);
        }
        any
    }

    /// Lets the processes do what is due.
    ///
    /// # Errors
    /// A batch is wrong.
    pub(super) fn act(&self, now: Instant) -> Result<(), String> {
        let mut state = self.lock();
        while let Some(first) = state.plans.first_entry().filter(|first| first.key().0 <= now) {
            let (pid, event) = first.remove();
            state.act(pid, event, now)?;
        }
        Ok(())
    }

    fn start(self: &Arc<Self>) -> io::Result<process::Worker> {
        let mut state = self.lock();
        let of = state.faults.start;
        if state.random.chance(of) {
            state.seen.not_started += 1;
            return Err(io::Error::other("no process can be started"));
        }
        state.seen.started += 1;
        let pid = state.next_pid;
        state.next_pid += 1;
        let (link, end) = worker_end::create();
        let (ended, is_over) = watch::channel(None);
        state.living.insert(pid, Process { worker: Worker::of((), end), executes: false, ended });
        let process = Box::new(Handle { pid, is_over, all: self.clone() });
        Ok(process::Worker { process, link, temporary: None })
    }
}

impl State {
    /// Plans what a process does within `most_us` microseconds.
    fn plan(&mut self, pid: u32, most_us: u64, event: ProcessEvent) {
        let at = clock::now() + Duration::from_micros(1 + self.random.below(most_us));
        self.next_plan += 1;
        self.plans.insert((at, self.next_plan), (pid, event));
    }

    fn read(&mut self, pid: u32) -> bool {
        let Some(process) = self.living.get_mut(&pid) else { return false };
        let new = process.worker.read();
        let to_load = std::mem::take(&mut process.worker.to_load);
        let to_stop = std::mem::take(&mut process.worker.to_stop);
        let executes = !process.executes && !process.worker.batches.is_empty();
        process.executes |= executes;
        let faults = self.faults;
        if to_load {
            let event = match self.random.chance(faults.load) {
                true if self.random.chance(2) => ProcessEvent::End(KILL),
                true => ProcessEvent::FailToLoad,
                false => ProcessEvent::Load,
            };
            self.plan(pid, 30_000, event);
        }
        if to_stop && !self.random.chance(faults.stay) {
            self.plan(pid, 5_000, ProcessEvent::End(0));
        }
        if executes {
            let event = if self.random.chance(faults.die) {
                ProcessEvent::End(KILL)
            } else {
                ProcessEvent::Execute
            };
            self.plan(pid, 4_000, event);
        }
        new > 0 || to_load || to_stop
    }

    fn act(&mut self, pid: u32, event: ProcessEvent, now: Instant) -> Result<(), String> {
        let fails = self.random.chance(self.faults.fail);
        let Some(process) = self.living.get_mut(&pid) else { return Ok(()) };
        match event {
            ProcessEvent::Load => {
                self.seen.loaded += 1;
                // A worker may report anything, also after the load.
                let progress = ToFrontend::LoadProgress(pid.to_le_bytes()[0]);
                process.worker.end.send(&progress);
                process.worker.end.send(&ToFrontend::Loaded(Loaded {
                    engine: "simulated".to_owned(),
                    memory: 0,
                    details: false,
                    has_readiness_check: false,
                    pinned: 0,
                }));
                process.worker.end.send(&progress);
            }
            ProcessEvent::FailToLoad => {
                self.seen.not_loaded += 1;
                process.worker.end.send(&ToFrontend::LoadFailed("the model is broken".to_owned()));
            }
            ProcessEvent::Execute => {
                self.seen.executed += 1;
                let failed: &[u32] = if fails { &[0] } else { &[] };
                let done = process.worker.execute(false, failed, now)?;
                process.worker.end.send(&ToFrontend::Done(done));
                process.executes = !process.worker.batches.is_empty();
                if process.executes {
                    let dies = self.random.chance(self.faults.die);
                    self.plan(
                        pid,
                        4_000,
                        if dies { ProcessEvent::End(KILL) } else { ProcessEvent::Execute },
                    );
                }
            }
            ProcessEvent::End(status) => {
                self.seen.died += u64::from(status != 0);
                let Some(process) = self.living.remove(&pid) else { return Ok(()) };
                process.ended.send_replace(Some(ExitStatus::from_raw(status)));
            }
        }
        Ok(())
    }
}

impl StartWorkers for Arc<Processes> {
    fn start<'a>(
        &'a self,
        _: &'a Launch,
        _: &'a ProcessPlacement<'a>,
        _: Printed,
        _: EventLoop,
    ) -> Pin<Box<dyn Future<Output = io::Result<process::Worker>> + Send + 'a>> {
        let started = Processes::start(self);
        Box::pin(async { started })
    }
}

/// What the supervision has of a process.
struct Handle {
    pid: u32,
    is_over: watch::Receiver<Option<ExitStatus>>,
    all: Arc<Processes>,
}

impl WorkerProcess for Handle {
    fn id(&self) -> Option<u32> {
        self.is_over.borrow().is_none().then_some(self.pid)
    }

    fn wait(&mut self) -> Pin<Box<dyn Future<Output = io::Result<ExitStatus>> + Send + '_>> {
        Box::pin(async {
            let status =
                self.is_over.wait_for(Option::is_some).await.ok().and_then(|status| *status);
            status.ok_or_else(|| io::Error::other("unknown"))
        })
    }

    fn start_kill(&mut self) -> io::Result<()> {
        self.all.lock().plan(self.pid, 2_000, ProcessEvent::End(KILL));
        Ok(())
    }

    fn describe(&self, status: ExitStatus) -> String {
        status.to_string()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.id().is_some() {
            let _ = self.start_kill();
        }
    }
}
