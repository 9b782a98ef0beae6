//! Splits a tensor that holds the consecutive parts of a batch's requests.

/// Returns the end of each request's bytes if all rows have one size.
pub fn fixed_ends(len: usize, rows_of: &[u64]) -> Vec<usize> {
    let rows: u64 = rows_of.iter().sum::<u64>().max(1);
    let mut before = 0;
    let ends = rows_of.iter().map(|rows_here| {
        before += rows_here;
        usize::try_from(len as u128 * u128::from(before) / u128::from(rows)).unwrap_or(len)
    });
    ends.collect()
}

/// Returns the end of each request's elements in a serialized BYTES tensor; `None` if `data` is not
/// exactly `elements` elements.
pub fn text_ends(data: &[u8], elements: u64, rows_of: &[u64]) -> Option<Vec<usize>> {
    let per_row = elements / rows_of.iter().sum::<u64>().max(1);
    let mut at: usize = 0;
    let mut ends = Vec::with_capacity(rows_of.len());
    for rows in rows_of {
        for _ in 0..per_row.checked_mul(*rows)? {
            let prefix = data.get(at..at.checked_add(4)?)?.try_into().ok()?;
            at = at.checked_add(4)?.checked_add(u32::from_le_bytes(prefix) as usize)?;
        }
        ends.push(at);
    }
    (at == data.len()).then_some(ends)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_rows_by_request() {
        assert_eq!(fixed_ends(60, &[1, 3, 2]), [10, 40, 60]);
        assert_eq!(fixed_ends(0, &[1, 1]), [0, 0]);
        let data = b"\x01\0\0\0a\0\0\0\0\x02\0\0\0bc";
        assert_eq!(text_ends(data, 3, &[2, 1]), Some(vec![9, 15]));
        assert_eq!(text_ends(data, 2, &[1, 1]), None);
        assert_eq!(text_ends(&data[..10], 3, &[3]), None);
    }
}
