//! `timeout_action: DELAY`: requests whose timeouts have passed are served after the others of
//! their level.

use super::{batching, ms, sim, ticket, timed};
use crate::scheduler::sim::Event;
use crate::scheduler::{QueuePolicy, Settings, Ticket, TimeoutAction};

#[test]
fn a_delayed_request_is_served_after_all_others() {
    let queue_policy = QueuePolicy {
        default_timeout_us: 30_000,
        timeout_action: TimeoutAction::Delay,
        ..QueuePolicy::default()
    };
    let mut sim = sim(Settings { queue_policy, ..Settings::default() });
    (1..3).for_each(|number| sim.at(ms(0), Event::Arrive(ticket(number))));
    (3..5).for_each(|number| sim.at(ms(90), Event::Arrive(ticket(number))));
    sim.service = vec![ms(100), ms(1)];
    sim.run();
    assert_eq!(sim.batches().collect::<Vec<_>>(), [[1], [3], [4], [2]]);
}

#[test]
fn the_queue_delay_of_a_delayed_request_starts_with_its_arrival() {
    let queue_policy = QueuePolicy {
        default_timeout_us: 100_000,
        timeout_action: TimeoutAction::Delay,
        ..QueuePolicy::default()
    };
    let mut sim = sim(Settings { queue_policy, ..batching(8, &[4, 8], 10_000_000) });
    sim.at(ms(0), Event::Arrive(ticket(1)));
    sim.at(ms(200), Event::Arrive(Ticket { batch_size: 2, ..ticket(2) }));
    sim.at(ms(201), Event::Arrive(Ticket { batch_size: 2, ..ticket(3) }));
    sim.run();
    assert_eq!(timed(&sim), [(201, vec![2, 3]), (10_000, vec![1])]);
}

#[test]
fn late_requests_keep_their_order() {
    let queue_policy = QueuePolicy {
        default_timeout_us: 90_000,
        timeout_action: TimeoutAction::Delay,
        allow_timeout_override: true,
        ..QueuePolicy::default()
    };
    let mut sim = sim(Settings { queue_policy, ..Settings::default() });
    for (number, timeout_us) in [(1, 0), (2, 60_000), (3, 10_000)] {
        sim.at(ms(0), Event::Arrive(Ticket { timeout_us, ..ticket(number) }));
    }
    sim.at(ms(50), Event::Arrive(ticket(4)));
    sim.service = vec![ms(100), ms(1)];
    sim.run();
    assert_eq!(sim.batches().collect::<Vec<_>>(), [[1], [4], [2], [3]]);
}
