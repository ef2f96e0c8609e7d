//! Counts of what happened in runs. Runs in which little happened prove little.

/// Declares a struct of counts that can be added up, and that names those that are 0.
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

            /// What has not happened once.
            pub fn missing(&self) -> Vec<String> {
                let all = [$((stringify!($field), self.$field)),*];
                let missing = all.into_iter().filter(|&(_, count)| count == 0);
                missing.map(|(name, _)| name.to_string()).collect()
            }
        }
    };
}

pub(crate) use counts;
