//! The function `strftime_now` of chat templates, with Python's directives, English names and the time in UTC.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

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
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// Formats a time. Unknown directives stay unchanged.
pub fn strftime(format: &str, now: SystemTime) -> String {
    let mut out = String::with_capacity(format.len() + 16);
    Civil::new(now).write(format, &mut out);
    out
}

struct Civil {
    year: i64,
    /// The month, from 1.
    month: u64,
    day: u64,
    /// The day of the year, from 1.
    day_of_year: u64,
    /// The day of the week, from Sunday, which is 0.
    weekday: u64,
    hour: u64,
    minute: u64,
    second: u64,
    microsecond: u32,
    unix_seconds: u64,
}

impl Civil {
    fn new(now: SystemTime) -> Self {
        let since_epoch = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_seconds = since_epoch.as_secs();
        let days = unix_seconds / 86_400;
        let second_of_day = unix_seconds % 86_400;

        // Years are counted from March, so that the leap day is the last day of a year.
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let day_of_era = shifted % 146_097;
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let day = day_from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 {
            month_from_march + 3
        } else {
            month_from_march - 9
        };
        let year = (year_of_era + era * 400 + u64::from(month <= 2)) as i64;
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let day_of_year = if month <= 2 {
            day_from_march - 305
        } else {
            day_from_march + 60 + u64::from(is_leap)
        };

        Self {
            year,
            month,
            day,
            day_of_year,
            weekday: (days + 4) % 7,
            hour: second_of_day / 3_600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
            microsecond: since_epoch.subsec_micros(),
            unix_seconds,
        }
    }

    fn write(&self, format: &str, out: &mut String) {
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next();
            let is_bare = directive == Some('-');
            if is_bare {
                directive = chars.next();
            }
            match directive {
                Some(directive) => self.write_directive(directive, is_bare, out),
                None => out.push_str(if is_bare { "%-" } else { "%" }),
            }
        }
    }

    fn write_directive(&self, directive: char, is_bare: bool, out: &mut String) {
        let month = MONTHS[self.month as usize - 1];
        let weekday = DAYS[self.weekday as usize];
        let hour_of_twelve = (self.hour + 11) % 12 + 1;
        match directive {
            'd' => write_number(self.day, 2, is_bare, out),
            'm' => write_number(self.month, 2, is_bare, out),
            'y' => write_number(self.year as u64 % 100, 2, is_bare, out),
            'H' => write_number(self.hour, 2, is_bare, out),
            'I' => write_number(hour_of_twelve, 2, is_bare, out),
            'M' => write_number(self.minute, 2, is_bare, out),
            'S' => write_number(self.second, 2, is_bare, out),
            'j' => write_number(self.day_of_year, 3, is_bare, out),
            'f' => write_number(self.microsecond.into(), 6, is_bare, out),
            'Y' => write_number(self.year as u64, 4, is_bare, out),
            's' => write_number(self.unix_seconds, 1, is_bare, out),
            'u' => write_number((self.weekday + 6) % 7 + 1, 1, is_bare, out),
            'w' => write_number(self.weekday, 1, is_bare, out),
            'B' => out.push_str(month),
            'b' | 'h' => out.push_str(&month[..3]),
            'A' => out.push_str(weekday),
            'a' => out.push_str(&weekday[..3]),
            'p' => out.push_str(if self.hour < 12 { "AM" } else { "PM" }),
            'e' => {
                let _ = write!(out, "{:>2}", self.day);
            }
            'F' => self.write("%Y-%m-%d", out),
            'T' | 'X' => self.write("%H:%M:%S", out),
            'R' => self.write("%H:%M", out),
            'D' | 'x' => self.write("%m/%d/%y", out),
            'c' => self.write("%a %b %e %H:%M:%S %Y", out),
            'n' => out.push('\n'),
            't' => out.push('\t'),
            '%' => out.push('%'),
            // Python prints an empty text for a time without a zone.
            'Z' | 'z' => {}
            other => {
                out.push('%');
                if is_bare {
                    out.push('-');
                }
                out.push(other);
            }
        }
    }
}

fn write_number(value: u64, width: usize, is_bare: bool, out: &mut String) {
    let width = if is_bare { 0 } else { width };
    let _ = write!(out, "{value:0width$}");
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The expected texts come from Python 3.11 for the same seconds in UTC.
    #[test]
    fn prints_what_python_prints() {
        let format = "%Y-%m-%d %H:%M:%S|%A, %B %-d|%y %j %I %p %a %-m %-H %w %u|%% %f|%c|%e %h|%-I";
        let cases = [
            (
                0,
                "1970-01-01 00:00:00|Thursday, January 1|70 001 12 AM Thu 1 0 4 4|% 000000\
                 |Thu Jan  1 00:00:00 1970| 1 Jan|12",
            ),
            (
                951_868_799,
                "2000-02-29 23:59:59|Tuesday, February 29|00 060 11 PM Tue 2 23 2 2|% 000000\
                 |Tue Feb 29 23:59:59 2000|29 Feb|11",
            ),
            (
                959_126_400,
                "2000-05-24 00:00:00|Wednesday, May 24|00 145 12 AM Wed 5 0 3 3|% 000000\
                 |Wed May 24 00:00:00 2000|24 May|12",
            ),
            (
                1_709_168_461,
                "2024-02-29 01:01:01|Thursday, February 29|24 060 01 AM Thu 2 1 4 4|% 000000\
                 |Thu Feb 29 01:01:01 2024|29 Feb|1",
            ),
            (
                1_735_689_599,
                "2024-12-31 23:59:59|Tuesday, December 31|24 366 11 PM Tue 12 23 2 2|% 000000\
                 |Tue Dec 31 23:59:59 2024|31 Dec|11",
            ),
            (
                4_102_444_799,
                "2099-12-31 23:59:59|Thursday, December 31|99 365 11 PM Thu 12 23 4 4|% 000000\
                 |Thu Dec 31 23:59:59 2099|31 Dec|11",
            ),
        ];
        for (seconds, expected) in cases {
            assert_eq!(
                strftime(format, UNIX_EPOCH + Duration::from_secs(seconds)),
                expected
            );
        }
    }

    #[test]
    fn what_is_no_directive_stays() {
        assert_eq!(strftime("100% %Q %-Q %-", UNIX_EPOCH), "100% %Q %-Q %-");
        assert_eq!(strftime("%", UNIX_EPOCH), "%");
    }
}
