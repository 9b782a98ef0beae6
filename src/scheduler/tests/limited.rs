//! Several models that share a rate limiter, in virtual time: random demands, arrivals, losses,
//! loads and unloads, and grants that reach their driver late, as with two threads.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::random::Random;
use super::{ms, us};
use crate::id::{InstanceId, RequestId};
use crate::scheduler::rate_limiter::{Demand, Limit, Member, Need};
use crate::scheduler::{
    Action, QueuePolicy, RateLimiter, Scheduler, Settings, Ticket, TimeoutAction, create,
};
use crate::timeline::Instant;

#[derive(Debug)]
enum Event {
    Arrive(usize, Ticket),
    Cancel(usize, RequestId),
    Done(usize, InstanceId, u32),
    Lose(usize, InstanceId),
    Join(usize, InstanceId),
    Load(usize),
    Unload(usize),
    /// The oldest pending grant arrives.
    Deliver,
    Wake(usize),
}

#[derive(Default)]
struct Instance {
    ready: bool,
    generation: u32,
    batch: Option<Vec<RequestId>>,
}

struct Model {
    settings: Settings,
    demands: Vec<Demand>,
    scheduler: Box<dyn Scheduler>,
    members: Vec<Member>,
    instances: Vec<Instance>,
    /// Requests without an answer: their tickets, their arrival times, and whether they were lost
    /// once.
    open: BTreeMap<RequestId, (Ticket, Instant, bool)>,
    /// The number of executions of each instance.
    executed: Vec<u64>,
    service: u64,
    loaded: bool,
}

struct World {
    random: Random,
    now: Instant,
    limiter: RateLimiter,
    limits: Vec<Limit>,
    models: Vec<Model>,
    owners: BTreeMap<Member, (usize, InstanceId)>,
    events: BTreeMap<(Instant, u64), Event>,
    planned: u64,
    mailbox: VecDeque<Member>,
    /// When each staged instance was staged.
    staged: BTreeMap<Member, Instant>,
    longest_wait: u64,
    arrived: u64,
    answered: u64,
    late: bool,
}

impl World {
    fn new(seed: u64, limits: Vec<Limit>) -> Self {
        Self {
            random: Random(seed),
            now: Instant(0),
            limiter: RateLimiter::new(limits.clone()),
            limits,
            models: Vec::new(),
            owners: BTreeMap::new(),
            events: BTreeMap::new(),
            planned: 0,
            mailbox: VecDeque::new(),
            staged: BTreeMap::new(),
            longest_wait: 0,
            arrived: 0,
            answered: 0,
            late: false,
        }
    }

    fn at(&mut self, time: Instant, event: Event) {
        self.planned += 1;
        self.events.insert((time, self.planned), event);
    }

    /// Adds a model that is not loaded yet; each of its executions takes `service` microseconds,
    /// some twice that.
    fn add(&mut self, settings: Settings, demands: Vec<Demand>, service: u64) -> usize {
        let settings = Settings { rate_limited: true, ..settings };
        let scheduler = create(settings.clone());
        self.models.push(Model {
            settings,
            executed: vec![0; demands.len()],
            demands,
            scheduler,
            members: Vec::new(),
            instances: Vec::new(),
            open: BTreeMap::new(),
            service,
            loaded: false,
        });
        self.models.len() - 1
    }

    fn load(&mut self, model: usize) {
        let demands = self.models[model].demands.clone();
        let Ok(members) = self.limiter.register(&demands) else { return };
        for (number, member) in (0..).zip(&members) {
            self.owners.insert(*member, (model, InstanceId(number)));
        }
        let loaded = &mut self.models[model];
        loaded.scheduler = create(loaded.settings.clone());
        loaded.instances = members.iter().map(|_| Instance::default()).collect();
        loaded.loaded = true;
        loaded.members = members;
        for number in 0..demands.len() as u32 {
            self.happen(Event::Join(model, InstanceId(number)));
        }
    }

    fn unload(&mut self, model: usize) {
        let now = self.now;
        self.models[model].scheduler.stop(now);
        self.models[model].scheduler.reject_all(crate::scheduler::RejectReason::Stopping, now);
        self.turn(model);
        for number in 0..self.models[model].instances.len() as u32 {
            let instance = &mut self.models[model].instances[number as usize];
            instance.ready = false;
            instance.generation += 1;
            let batch = instance.batch.take();
            self.models[model].scheduler.instance_lost(InstanceId(number), now);
            batch.into_iter().flatten().for_each(|request| self.answer(model, request));
        }
        self.turn(model);
        let members = std::mem::take(&mut self.models[model].members);
        self.models[model].loaded = false;
        self.limiter.unregister(&members);
        members.iter().for_each(|member| {
            self.owners.remove(member);
            self.staged.remove(member);
        });
    }

    fn happen(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Load(model) if !self.models[model].loaded => return self.load(model),
            Event::Unload(model) if self.models[model].loaded => return self.unload(model),
            Event::Deliver => return self.deliver(),
            Event::Load(_) | Event::Unload(_) => return,
            Event::Arrive(model, ref ticket) if self.models[model].loaded => {
                self.arrived += 1;
                self.models[model].open.insert(ticket.request, (ticket.clone(), now, false));
                self.models[model].scheduler.enqueue(ticket.clone(), now);
            }
            Event::Cancel(model, request) => self.models[model].scheduler.cancel(request, now),
            Event::Done(model, instance, generation) => self.done(model, instance, generation),
            Event::Lose(model, instance) => self.lose(model, instance),
            Event::Join(model, instance) => {
                if let Some(joined) = self.models[model]
                    .instances
                    .get_mut(instance.0 as usize)
                    .filter(|one| !one.ready)
                {
                    joined.ready = true;
                    self.models[model].scheduler.instance_ready(instance, now);
                }
            }
            Event::Wake(model) => {
                if self.models[model].scheduler.poll_timeout().is_some_and(|due| due <= now) {
                    self.models[model].scheduler.handle_timeout(now);
                }
            }
            Event::Arrive(..) => return,
        }
        let (Event::Arrive(model, _)
        | Event::Cancel(model, _)
        | Event::Done(model, ..)
        | Event::Lose(model, _)
        | Event::Join(model, _)
        | Event::Wake(model)) = event
        else {
            return;
        };
        self.turn(model);
    }

    fn done(&mut self, model: usize, instance: InstanceId, generation: u32) {
        let owner = &mut self.models[model];
        let Some(done) =
            owner.instances.get_mut(instance.0 as usize).filter(|one| one.generation == generation)
        else {
            return;
        };
        let batch = done.batch.take();
        owner.scheduler.batch_done(instance, self.now);
        batch.into_iter().flatten().for_each(|request| self.answer(model, request));
    }

    fn lose(&mut self, model: usize, instance: InstanceId) {
        let now = self.now;
        let owner = &mut self.models[model];
        let Some(lost) = owner.instances.get_mut(instance.0 as usize).filter(|one| one.ready)
        else {
            return;
        };
        lost.ready = false;
        lost.generation += 1;
        let batch = lost.batch.take();
        owner.scheduler.instance_lost(instance, now);
        for request in batch.into_iter().flatten() {
            match owner.open.get_mut(&request) {
                Some((ticket, queued, retried @ false)) => {
                    *retried = true;
                    owner.scheduler.requeue(ticket.clone(), *queued, now);
                }
                _ => {
                    owner.open.remove(&request);
                    self.answered += 1;
                }
            }
        }
    }

    fn answer(&mut self, model: usize, request: RequestId) {
        assert!(self.models[model].open.remove(&request).is_some(), "{request:?} is answered once");
        self.answered += 1;
    }

    /// Acts as the driver: performs decisions, and passes on grants of the limiter.
    fn turn(&mut self, model: usize) {
        loop {
            while let Some(action) = self.models[model].scheduler.poll_action(self.now) {
                self.perform(model, action);
            }
            let Some(member) = self.limiter.poll(self.now) else { break };
            self.check_grant(member);
            let (owner, instance) = self.owners[&member];
            if owner == model {
                self.models[model].scheduler.resources_granted(instance, self.now);
            } else if self.late && self.random.chance(3) {
                self.mailbox.push_back(member);
                let after = us(self.random.below(400));
                self.at(self.now + after, Event::Deliver);
            } else {
                self.grant(member);
            }
        }
        if let Some(due) = self.models[model].scheduler.poll_timeout() {
            assert!(due > self.now, "a busy loop");
            self.at(due, Event::Wake(model));
        }
    }

    fn deliver(&mut self) {
        if let Some(member) = self.mailbox.pop_front() {
            self.grant(member);
        }
    }

    /// Delivers a grant to its driver, possibly after its instance or its model was removed.
    fn grant(&mut self, member: Member) {
        let Some(&(model, instance)) = self.owners.get(&member) else { return };
        if self.limiter.holds(member) {
            self.models[model].scheduler.resources_granted(instance, self.now);
        }
        self.turn(model);
    }

    fn perform(&mut self, model: usize, action: Action) {
        let member = |instance: InstanceId| self.models[model].members[instance.0 as usize];
        match action {
            Action::Reject { request, .. } => self.answer(model, request),
            Action::Acquire { instance } => {
                let member = member(instance);
                assert!(
                    self.models[model].instances[instance.0 as usize].ready,
                    "a lost instance is staged"
                );
                self.limiter.stage(member, self.now);
                self.staged.insert(member, self.now);
            }
            Action::Withdraw { instance } => {
                let member = member(instance);
                self.limiter.withdraw(member);
                self.staged.remove(&member);
            }
            Action::Release { instance } => self.limiter.release(member(instance)),
            Action::Execute { instance, requests, .. } => {
                assert!(
                    self.limiter.holds(member(instance)),
                    "an instance executes without its resources"
                );
                let at = instance.0 as usize;
                let service = us(self.models[model].service * (1 + self.random.below(2)));
                let executing = &mut self.models[model].instances[at];
                assert!(
                    executing.ready && executing.batch.replace(requests).is_none(),
                    "one batch at a time"
                );
                let generation = executing.generation;
                self.models[model].executed[at] += 1;
                self.at(self.now + service, Event::Done(model, instance, generation));
            }
            other => unreachable!("{other:?} without sequences"),
        }
    }

    /// Checks that held resources are within the limits at each grant. Counts them independently of
    /// the limiter, over executing instances and pending grants.
    fn check_grant(&mut self, member: Member) {
        let since = self.staged.remove(&member).expect("only staged instances get resources");
        self.longest_wait = self.longest_wait.max(self.now.ns_since(since));
        let (model, instance) = self.owners[&member];
        for need in &self.models[model].demands[instance.0 as usize].resources {
            let same = |other: &&Need| (&other.name, other.device) == (&need.name, need.device);
            let held: u32 = self
                .holders()
                .flat_map(|demand| demand.resources.iter().find(same))
                .map(|n| n.count)
                .sum();
            let loaded =
                self.models.iter().filter(|model| model.loaded).flat_map(|model| &model.demands);
            let most = loaded
                .flat_map(|demand| demand.resources.iter().filter(same))
                .map(|need| need.count)
                .max();
            let limit = self
                .limits
                .iter()
                .find(|limit| limit.name == need.name)
                .map(|limit| limit.count)
                .or(most);
            assert!(
                need.count == 0 || Some(held) <= limit,
                "{held} of {limit:?} {need:?} are held at {:?}",
                self.now
            );
        }
    }

    fn holders(&self) -> impl Iterator<Item = &Demand> {
        let holding = self.owners.iter().filter(|(member, _)| self.limiter.holds(**member));
        holding.map(|(_, (model, instance))| &self.models[*model].demands[instance.0 as usize])
    }

    /// Checks that each instance that holds resources executes, or has a pending grant.
    fn check_no_leak(&self) {
        for (member, (model, instance)) in &self.owners {
            let executes = self.models[*model].instances[instance.0 as usize].batch.is_some();
            let on_its_way = self.mailbox.contains(member);
            assert!(
                executes <= self.limiter.holds(*member),
                "{instance:?} of {model} executes without resources"
            );
            assert!(
                executes || on_its_way || !self.limiter.holds(*member),
                "{instance:?} of {model} leaks"
            );
        }
    }

    fn run(&mut self) {
        while let Some(((time, _), event)) = self.events.pop_first() {
            self.now = time;
            self.happen(event);
            self.check_no_leak();
        }
        assert_eq!(self.answered, self.arrived, "each request is answered once");
        assert!(self.staged.is_empty() && self.mailbox.is_empty());
        assert!(
            self.limiter.usage().iter().all(|usage| usage.used == 0),
            "{:?}",
            self.limiter.usage()
        );
    }
}

fn need(name: &str, device: Option<u32>, count: u32) -> Need {
    Need { name: name.to_owned(), device, count }
}

fn random_demand(random: &mut Random) -> Demand {
    let mut resources = Vec::new();
    for (name, global) in [("global", true), ("scarce", true), ("device", false)] {
        if random.chance(2) {
            let device = (!global).then(|| random.below(2) as u32);
            resources.push(need(name, device, random.below(5) as u32));
        }
    }
    Demand { resources, priority: [0, 1, 1, 2, 3, 10][random.below(6) as usize] }
}

fn random_settings(random: &mut Random) -> Settings {
    let queue_policy = QueuePolicy {
        max_queue_size: [0, 0, 5][random.below(3) as usize],
        default_timeout_us: [0, 0, 3_000][random.below(3) as usize],
        allow_timeout_override: false,
        timeout_action: if random.chance(2) { TimeoutAction::Reject } else { TimeoutAction::Delay },
    };
    Settings {
        max_batch_size: 1 + random.below(8) as u32,
        preferred_batch_sizes: if random.chance(2) { vec![2, 4] } else { Vec::new() },
        max_queue_delay_us: [0, 0, 300][random.below(3) as usize],
        priority_levels: random.below(3),
        default_priority_level: 1,
        queue_policy,
        ..Settings::default()
    }
}

/// Creates a random simulation with this many requests for each model, with all its events planned.
fn random_world(seed: u64, requests: u64) -> World {
    let mut random = Random(seed);
    let limits = if random.chance(3) {
        vec![Limit { name: "scarce".to_owned(), count: 4, device: None }]
    } else {
        vec![]
    };
    let mut world = World::new(seed, limits);
    world.late = random.chance(2);
    for _ in 0..2 + random.below(4) {
        let demands: Vec<Demand> =
            (0..1 + random.below(3)).map(|_| random_demand(&mut random)).collect();
        let settings = random_settings(&mut random);
        let service = 50 + random.below(900);
        let instances = demands.len() as u64;
        let model = world.add(settings, demands, service);
        world.at(Instant(0), Event::Load(model));
        let mut time = 0;
        let busy = 1 + random.below(400);
        for number in 0..requests {
            time += random.below(busy);
            let request = RequestId(number);
            let shape_key = random.below(10) / 9;
            let ticket = Ticket {
                request,
                batch_size: 1,
                shape_key,
                priority: random.below(3),
                ..Ticket::default()
            };
            world.at(Instant(0) + us(time), Event::Arrive(model, ticket));
            if random.chance(20) {
                world
                    .at(Instant(0) + us(time + random.below(2_000)), Event::Cancel(model, request));
            }
            if random.chance(100) {
                let instance = InstanceId(random.below(instances) as u32);
                world.at(Instant(0) + us(time), Event::Lose(model, instance));
                world.at(Instant(0) + us(time + random.below(5_000)), Event::Join(model, instance));
            }
            if random.chance(300) {
                world.at(Instant(0) + us(time), Event::Unload(model));
                world.at(Instant(0) + us(time + random.below(20_000)), Event::Load(model));
            }
        }
        // All lost instances return at the end, so that every request can be answered.
        for number in 0..instances as u32 {
            world.at(Instant(0) + us(time + 30_000), Event::Join(model, InstanceId(number)));
        }
    }
    world
}

/// Checks over a million requests: limits hold, all resources are released, each request is
/// answered once, and none starves.
#[test]
fn models_share_resources_within_the_limits() {
    let mut arrived = 0;
    let mut refused_to_load = 0;
    for seed in 0..SEEDS {
        let mut world = random_world(seed, REQUESTS);
        world.run();
        arrived += world.arrived;
        refused_to_load +=
            world.models.iter().filter(|model| model.executed.iter().sum::<u64>() == 0).count();
        let slowest =
            world.models.iter().map(|model| 2 * model.service + 400).max().unwrap_or_default();
        let instances: usize = world.models.iter().map(|model| model.demands.len()).sum();
        // An instance of priority 10 lets ten executions of each other pass, and waits for those
        // before it.
        let bound = us(slowest * (instances * instances * 11) as u64);
        assert!(
            world.longest_wait < bound.as_nanos() as u64,
            "seed {seed}: {} ns",
            world.longest_wait
        );
    }
    assert!(
        arrived > 1_200_000 && refused_to_load < 400,
        "{arrived} requests, {refused_to_load} models without any"
    );
}

const SEEDS: u64 = 400;
const REQUESTS: u64 = 1_500;

fn one(name: &str, count: u32, priority: u32) -> Demand {
    Demand { resources: vec![need(name, None, count)], priority }
}

/// Creates a simulation of models with one instance each that are always busy for a second.
fn busy_world(seed: u64, demands: &[Demand], limits: Vec<Limit>) -> World {
    let mut world = World::new(seed, limits);
    for demand in demands {
        let service = 200 + world.random.below(800);
        let model = world.add(Settings::default(), vec![demand.clone()], service);
        world.at(Instant(0), Event::Load(model));
        for number in 0..4_000 {
            let ticket = super::ticket(number);
            world.at(Instant(1), Event::Arrive(model, ticket));
        }
        world.at(Instant(0) + ms(1_000), Event::Unload(model));
    }
    world
}

/// Instances that are always busy and exclude each other execute in inverse proportion to their
/// priorities, at any time.
#[test]
fn executions_are_shared_by_priority() {
    for seed in 0..200 {
        let mut random = Random(seed);
        let priorities: Vec<u32> =
            (0..2 + random.below(4)).map(|_| 1 + random.below(12) as u32).collect();
        let demands: Vec<Demand> =
            priorities.iter().map(|priority| one("R", 1, *priority)).collect();
        let mut world = busy_world(seed, &demands, Vec::new());
        while let Some(((time, _), event)) = world.events.pop_first() {
            world.now = time;
            world.happen(event);
            let weighted = || {
                world
                    .models
                    .iter()
                    .zip(&priorities)
                    .map(|(model, p)| model.executed[0] * u64::from(*p))
            };
            let least = weighted().min().unwrap();
            let most = weighted().max().unwrap();
            let largest = u64::from(*priorities.iter().max().unwrap());
            assert!(
                most - least <= largest || time < Instant(2),
                "{priorities:?}: {:?}",
                weighted().collect::<Vec<_>>()
            );
            if time >= Instant(0) + ms(900) {
                break;
            }
        }
        assert!(world.models.iter().map(|model| model.executed[0]).sum::<u64>() > 500);
    }
}

/// An instance that needs all of a resource is served among many that need little, as often as its
/// weight requires.
#[test]
fn an_instance_with_a_large_need_does_not_starve() {
    let mut demands = vec![one("R", 1, 1); 6];
    demands.push(one("R", 4, 1));
    let mut world = busy_world(7, &demands, Vec::new());
    world.run();
    let executed: Vec<u64> = world.models.iter().map(|model| model.executed[0]).collect();
    let least = executed.iter().min().unwrap();
    assert!(executed[6] >= 200 && executed[6] <= 2 * least, "{executed:?}");
}

/// Instances without a common resource do not delay each other.
#[test]
fn others_continue_while_one_waits() {
    let demands = [one("R", 1, 1), one("R", 1, 1), one("S", 1, 1), Demand::default()];
    let mut world = busy_world(3, &demands, Vec::new());
    world.run();
    let executed: BTreeSet<u64> = world.models[2..].iter().map(|model| model.executed[0]).collect();
    let alone = |model: usize| 1_000_000 / (world.models[model].service * 3 / 2);
    assert!(
        executed.iter().zip([2, 3]).all(|(count, _)| *count > alone(2).min(alone(3)) * 9 / 10),
        "{executed:?}"
    );
}
