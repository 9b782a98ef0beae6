//! Random numbers for hand-written simulations.

/// A random number generator (SplitMix64).
pub(in crate::scheduler) struct Random(pub(in crate::scheduler) u64);

impl Random {
    pub(in crate::scheduler) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    /// Returns true with a probability of one in `of`.
    pub(in crate::scheduler) fn chance(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }
}
