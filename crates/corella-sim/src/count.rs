//! Counts of events in runs. Runs with few kinds of events prove little.

/// Declares a struct of counts, with a sum and the names of counts that are 0.
macro_rules! counts {
    ($(#[$of_struct:meta])* pub struct $name:ident { $($(#[$of_field:meta])* $field:ident,)* }) => {
        $(#[$of_struct])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$of_field])* pub $field: u64,)*
        }

        impl $name {
            pub fn add(&mut self, run: &Self) {
                $(self.$field += run.$field;)*
            }

            /// Returns the names of counts that are 0.
            pub fn missing(&self) -> Vec<String> {
                let all = [$((stringify!($field), self.$field)),*];
                let missing = all.into_iter().filter(|&(_, count)| count == 0);
                missing.map(|(name, _)| name.to_string()).collect()
            }
        }
    };
}

pub(crate) use counts;
