//! The time in `strftime_now`.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A date and a time of day, in the time zone of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CivilTime {
    /// The year.
    pub year: i32,
    /// The month, from 1 to 12.
    pub month: u8,
    /// The day of the month, from 1 to 31.
    pub day: u8,
    /// The hour, from 0 to 23.
    pub hour: u8,
    /// The minute, from 0 to 59.
    pub minute: u8,
    /// The second, from 0 to 60.
    pub second: u8,
}

impl CivilTime {
    /// Returns the time in UTC. `seconds` are seconds since 1970.
    ///
    /// The algorithm is `civil_from_days` of Howard Hinnant, "chrono-Compatible Low-Level Date
    /// Algorithms".
    pub fn from_unix(seconds: i64) -> Self {
        let second_of_day = seconds.rem_euclid(86_400);
        // Eras have 400 years and begin on 1 March.
        let days = seconds.div_euclid(86_400) + 719_468;
        let era = days.div_euclid(146_097);
        let day_of_era = days.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        Self {
            // Years beyond 32 bits have no meaning here.
            year: (era * 400 + year_of_era + i64::from(month <= 2)) as i32,
            month: month as u8,
            day: (day_of_year - (153 * shifted_month + 2) / 5 + 1) as u8,
            hour: (second_of_day / 3_600) as u8,
            minute: (second_of_day / 60 % 60) as u8,
            second: (second_of_day % 60) as u8,
        }
    }

    /// Returns the day of the week, 0 for Sunday (Sakamoto's algorithm).
    fn day_of_week(self) -> usize {
        const OFFSETS: [i64; 12] = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
        let year = i64::from(self.year) - i64::from(self.month < 3);
        let offset = OFFSETS.get(self.month_index()).copied().unwrap_or(0);
        let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
        (year + leap_days + offset + i64::from(self.day)).rem_euclid(7) as usize
    }

    /// Returns the day of the year, 1 for 1 January.
    fn day_of_year(self) -> u32 {
        const BEFORE: [u32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let is_leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        let before = BEFORE.get(self.month_index()).copied().unwrap_or(0);
        before + u32::from(self.day) + u32::from(is_leap && self.month > 2)
    }

    fn month_index(self) -> usize {
        usize::from(self.month.saturating_sub(1))
    }

    /// Formats the time like C's `strftime` in the C locale. `%-d` and its like have no padding.
    /// Unknown directives stay as they are.
    pub(super) fn format(self, format: &str) -> String {
        let mut output = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                output.push(character);
                continue;
            }
            match characters.next() {
                Some('-') => match characters.next() {
                    Some(directive) => self.directive(directive, 0, &mut output),
                    None => output.push_str("%-"),
                },
                Some(directive) => self.directive(directive, 2, &mut output),
                None => output.push('%'),
            }
        }
        output
    }

    fn directive(self, directive: char, width: usize, output: &mut String) {
        let hour = (self.hour % 12 + 11) % 12 + 1;
        let month = MONTHS.get(self.month_index()).copied().unwrap_or_default();
        let day = DAYS.get(self.day_of_week()).copied().unwrap_or_default();
        let noon = if self.hour < 12 { "AM" } else { "PM" };
        let year_of_century = self.year.rem_euclid(100);
        let day_of_year_width = if width == 0 { 0 } else { 3 };
        // Writing to memory cannot fail.
        let _ = match directive {
            'Y' => write!(output, "{}", self.year),
            'y' => write!(output, "{year_of_century:0width$}"),
            'm' => write!(output, "{:0width$}", self.month),
            'd' => write!(output, "{:0width$}", self.day),
            'e' => write!(output, "{:width$}", self.day),
            'H' => write!(output, "{:0width$}", self.hour),
            'I' => write!(output, "{hour:0width$}"),
            'M' => write!(output, "{:0width$}", self.minute),
            'S' => write!(output, "{:0width$}", self.second),
            'j' => write!(output, "{:0day_of_year_width$}", self.day_of_year()),
            'B' => write!(output, "{month}"),
            'b' | 'h' => write!(output, "{}", month.get(..3).unwrap_or_default()),
            'A' => write!(output, "{day}"),
            'a' => write!(output, "{}", day.get(..3).unwrap_or_default()),
            'w' => write!(output, "{}", self.day_of_week()),
            'p' => write!(output, "{noon}"),
            'F' => write!(output, "{}", self.format("%Y-%m-%d")),
            'T' | 'X' => write!(output, "{}", self.format("%H:%M:%S")),
            'R' => write!(output, "{}", self.format("%H:%M")),
            'D' | 'x' => write!(output, "{}", self.format("%m/%d/%y")),
            'c' => write!(output, "{}", self.format("%a %b %e %H:%M:%S %Y")),
            'f' => write!(output, "000000"),
            // Without a time zone, as in Python, both are empty.
            'z' | 'Z' => Ok(()),
            '%' => write!(output, "%"),
            other => write!(output, "%{other}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_seconds() {
        let date = |seconds| CivilTime::from_unix(seconds).format("%a %F %T %j");
        assert_eq!(date(0), "Thu 1970-01-01 00:00:00 001");
        assert_eq!(date(-1), "Wed 1969-12-31 23:59:59 365");
        assert_eq!(date(951_782_400), "Tue 2000-02-29 00:00:00 060");
        assert_eq!(date(1_795_884_969), "Sat 2026-11-28 16:56:09 332");
        assert_eq!(date(4_107_542_399), "Sun 2100-02-28 23:59:59 059");
        assert_eq!(date(4_107_542_400), "Mon 2100-03-01 00:00:00 060");
    }

    #[test]
    fn directives() {
        let time = CivilTime { year: 2026, month: 7, day: 4, hour: 15, minute: 5, second: 9 };
        let check = |format: &str, expected: &str| assert_eq!(time.format(format), expected);
        check("%d %b %Y", "04 Jul 2026");
        check("%-d %B %y, %A", "4 July 26, Saturday");
        check("%I:%M %p|%-I|%-H:%-M:%-S|%e|%-j", "03:05 PM|3|15:5:9| 4|185");
        check("%D %R %c", "07/04/26 15:05 Sat Jul  4 15:05:09 2026");
        check("%z%Z%%é%Q%", "%é%Q%");
        check("%-", "%-");
    }

    #[test]
    fn impossible_months_do_no_harm() {
        let time =
            CivilTime { year: i32::MIN, month: 255, day: 255, hour: 255, minute: 99, second: 99 };
        assert_eq!(time.format("%B%b%m"), "255");
        time.format("%c %j %I %w");
        CivilTime::from_unix(i64::MAX).format("%c");
        CivilTime::from_unix(i64::MIN).format("%c");
    }
}
