//! Tests of single decisions of the rate limiter.

use crate::scheduler::rate_limiter::{Demand, Limit, Member, Need, RateLimiter};
use crate::timeline::Instant;

const NOW: Instant = Instant(0);

/// Parses a demand: `R 2, S@1 3` is two of the global `R` and three of device 1's `S`.
fn demand(text: &str, priority: u32) -> Demand {
    Demand {
        resources: text
            .split(',')
            .filter(|part| !part.is_empty())
            .map(|part| {
                let (resource, count) = part.trim().split_once(' ').unwrap();
                let (name, device) = match resource.split_once('@') {
                    Some((name, device)) => (name, Some(device.parse().unwrap())),
                    None => (resource, None),
                };
                Need { name: name.to_owned(), device, count: count.parse().unwrap() }
            })
            .collect(),
        priority,
    }
}

fn limit(name: &str, count: u32, device: Option<u32>) -> Limit {
    Limit { name: name.to_owned(), count, device }
}

/// Creates a limiter with one instance for each demand.
fn limiter(demands: &[(&str, u32)], limits: Vec<Limit>) -> (RateLimiter, Vec<Member>) {
    let mut limiter = RateLimiter::new(limits);
    let demands: Vec<Demand> =
        demands.iter().map(|(text, priority)| demand(text, *priority)).collect();
    let members = limiter.register(&demands).unwrap();
    (limiter, members)
}

/// Returns the positions of all instances that get resources now.
fn granted(limiter: &mut RateLimiter, members: &[Member]) -> Vec<usize> {
    let granted = std::iter::from_fn(|| limiter.poll(NOW));
    granted.map(|member| members.iter().position(|other| *other == member).unwrap()).collect()
}

fn usage(limiter: &RateLimiter) -> Vec<(String, u32, u64)> {
    let name = |name: String, device: Option<u32>| {
        device.map_or(name.clone(), |device| format!("{name}@{device}"))
    };
    limiter
        .usage()
        .into_iter()
        .map(|usage| (name(usage.name, usage.device), usage.total, usage.used))
        .collect()
}

/// Returns the order of executions when all instances are always busy and only one can execute at a
/// time.
fn rounds(limiter: &mut RateLimiter, members: &[Member], count: usize) -> String {
    let mut order = String::new();
    for _ in 0..count {
        let [next] = granted(limiter, members)[..] else { panic!("one at a time") };
        order.push(char::from(b'a' + next as u8));
        limiter.release(members[next]);
        limiter.stage(members[next], NOW);
    }
    order
}

#[test]
fn the_amount_is_the_maximum_need_of_one_instance() {
    let (mut limiter, members) =
        limiter(&[("R 2, S@0 3", 1), ("R 4", 1), ("S@1 1", 1)], Vec::new());
    let total = |name: &str, total: u32| (name.to_owned(), total, 0);
    assert_eq!(usage(&limiter), [total("R", 4), total("S@0", 3), total("S@1", 1)]);
    let more = limiter.register(&[demand("R 9", 1)]).unwrap();
    assert_eq!(usage(&limiter)[0], total("R", 9));
    limiter.unregister(&more);
    limiter.unregister(&members[1..2]);
    assert_eq!(usage(&limiter), [total("R", 2), total("S@0", 3), total("S@1", 1)]);
    limiter.unregister(&members);
    assert_eq!(usage(&limiter), []);
}

#[test]
fn an_explicit_limit_fixes_the_amount() {
    for (limits, demanded, expected) in [
        (vec![limit("R", 9, None)], "R 2", 9),
        (vec![limit("R", 9, Some(7))], "R 2", 9),
        (vec![limit("R", 9, Some(7)), limit("R", 5, Some(8))], "R 2", 9),
        (vec![limit("R", 9, None), limit("R", 5, None)], "R@0 2", 5),
        (vec![limit("R", 9, None), limit("R", 5, Some(0))], "R@0 2", 9),
        (vec![limit("R", 5, None), limit("R", 9, Some(0))], "R@0 2", 9),
        (vec![limit("R", 5, None), limit("R", 9, Some(0))], "R@1 2", 5),
        (vec![limit("R", 9, Some(0))], "R@1 2", 2),
        (vec![limit("r", 9, None)], "R 2", 2),
    ] {
        let (limiter, _) = limiter(&[(demanded, 1)], limits.clone());
        assert_eq!(limiter.usage()[0].total, expected, "{limits:?} {demanded}");
    }
}

#[test]
fn unsatisfiable_demands_are_refused_without_effect() {
    let mut limiter = RateLimiter::new(vec![limit("R", 4, None)]);
    limiter.register(&[demand("S@0 1", 1)]).unwrap();
    let before = usage(&limiter);
    for (demanded, expected) in [
        (
            &["R 2", "R 5"][..],
            "Resource count for \"R\" is limited to 4 which will prevent scheduling of one or \
             more model instances, the minimum required count is 5",
        ),
        (
            &["S 1"],
            "Resource \"S\" is present as both global and device-specific resource in the model \
             configuration.",
        ),
        (
            &["T@1 1", "T 1"],
            "Resource \"T\" is present as both global and device-specific resource in the model \
             configuration.",
        ),
    ] {
        let demands: Vec<Demand> = demanded.iter().map(|text| demand(text, 1)).collect();
        assert_eq!(limiter.register(&demands).unwrap_err(), expected);
        assert_eq!(usage(&limiter), before);
    }
}

#[test]
fn staged_instances_are_served_by_executions_times_priority() {
    for (priorities, expected) in [
        (&[1, 1][..], "abababababab"),
        (&[0, 1, 1], "abcabcabcabc"),
        // A real Triton 2.51 executes in this order after its start.
        (&[1, 2], "aabaabaabaab"),
        (&[3, 1], "bbbabbbabbba"),
        (&[2, 4, 4], "aabcaabcaabc"),
    ] {
        let demands: Vec<(&str, u32)> =
            priorities.iter().map(|priority| ("R 1", *priority)).collect();
        let (mut limiter, members) = limiter(&demands, Vec::new());
        members.iter().for_each(|member| limiter.stage(*member, NOW));
        assert_eq!(rounds(&mut limiter, &members, expected.len()), expected, "{priorities:?}");
    }
}

#[test]
fn new_and_idle_instances_start_near_the_others() {
    let (mut limiter, mut members) = limiter(&[("R 1", 1), ("R 1", 1), ("R 1", 1)], Vec::new());
    members[..2].iter().for_each(|member| limiter.stage(*member, NOW));
    rounds(&mut limiter, &members, 1_000);
    limiter.stage(members[2], NOW);
    members.extend(limiter.register(&[demand("R 1", 1)]).unwrap());
    limiter.stage(members[3], NOW);
    let order = rounds(&mut limiter, &members, 12);
    for member in 'a'..='d' {
        assert_eq!(order.chars().filter(|c| *c == member).count(), 3, "{order}");
    }
}

#[test]
fn a_waiting_instance_reserves_its_needs_and_others_get_the_rest() {
    let (mut limiter, members) =
        limiter(&[("R 1", 1), ("R 3, S 1", 1), ("R 1", 1), ("S 2", 1), ("T 1", 1)], Vec::new());
    limiter.stage(members[0], NOW);
    assert_eq!(granted(&mut limiter, &members), [0]);
    members[1..].iter().for_each(|member| limiter.stage(*member, NOW));
    // Two units of R are free and one is missing; one of the two units of S is reserved.
    assert_eq!(granted(&mut limiter, &members), [4]);
    limiter.release(members[0]);
    assert_eq!(granted(&mut limiter, &members), [1]);
    limiter.release(members[1]);
    assert_eq!(granted(&mut limiter, &members), [2, 3]);
}

#[test]
fn overtaking_is_bounded_by_the_priorities() {
    // The first keeps one resource of the second busy most of the time; the third always competes
    // for the other one.
    let (mut limiter, members) =
        limiter(&[("R 1", 1), ("R 1, S 1", 1_000), ("S 1", 1)], Vec::new());
    members.iter().for_each(|member| limiter.stage(*member, NOW));
    let mut passed = 0;
    for _ in 0..10_000 {
        for next in granted(&mut limiter, &members) {
            passed = if next == 1 { 0 } else { passed + 1 };
            assert!(passed <= 2 * 1_001 + 2, "passed {passed} times");
            limiter.release(members[next]);
            limiter.stage(members[next], NOW);
        }
    }
}

#[test]
fn executions_without_competitors_cause_no_disadvantage() {
    // The third has executed ten thousand times without competitors. The second starts near it, and
    // so far behind the first.
    let (mut limiter, members) = limiter(&[("R 1", 1), ("R 1, S 1", 1), ("S 1", 1)], Vec::new());
    limiter.stage(members[2], NOW);
    rounds(&mut limiter, &members, 10_000);
    members.iter().for_each(|member| limiter.stage(*member, NOW));
    let mut executed = [0; 3];
    for _ in 0..600 {
        for next in granted(&mut limiter, &members) {
            executed[next] += 1;
            limiter.release(members[next]);
            limiter.stage(members[next], NOW);
        }
    }
    assert!(executed.iter().all(|count| *count >= 100), "{executed:?}");
}

#[test]
fn withdrawn_resources_are_free_and_count_as_no_execution() {
    let (mut limiter, members) = limiter(&[("R 1", 1), ("R 1", 1)], Vec::new());
    for _ in 0..5 {
        limiter.stage(members[0], NOW);
        assert_eq!(granted(&mut limiter, &members), [0]);
        limiter.withdraw(members[0]);
        assert!(!limiter.holds(members[0]) && limiter.usage()[0].used == 0);
    }
    members.iter().for_each(|member| limiter.stage(*member, NOW));
    assert_eq!(rounds(&mut limiter, &members, 4), "abab");
    limiter.withdraw(members[0]);
    limiter.withdraw(members[0]);
    assert_eq!(granted(&mut limiter, &members), [1]);
}

#[test]
fn unloading_a_holder_frees_its_resources_and_may_reduce_the_amount() {
    let (mut limiter, members) = limiter(&[("R 4", 1), ("R 2", 1), ("R 2", 1)], Vec::new());
    members[1..].iter().for_each(|member| limiter.stage(*member, NOW));
    assert_eq!(granted(&mut limiter, &members), [1, 2]);
    limiter.unregister(&members[..1]);
    assert_eq!(usage(&limiter), [("R".to_owned(), 2, 4)]);
    limiter.release(members[1]);
    limiter.stage(members[1], NOW);
    assert_eq!(granted(&mut limiter, &members), [0; 0], "both units are still held");
    limiter.unregister(&members[2..]);
    assert_eq!(granted(&mut limiter, &members), [1]);
}

#[test]
fn waiting_times_are_measured() {
    let (mut limiter, members) = limiter(&[("R 1", 1), ("R 1", 1)], Vec::new());
    members.iter().for_each(|member| limiter.stage(*member, Instant(10)));
    assert!(limiter.poll(Instant(10)).is_some());
    assert_eq!(limiter.waiting(members[0], Instant(25)), (false, 0));
    assert_eq!(limiter.waiting(members[1], Instant(25)), (true, 15));
    limiter.release(members[0]);
    assert!(limiter.poll(Instant(30)).is_some());
    assert_eq!(limiter.waiting(members[1], Instant(99)), (false, 20));
}
