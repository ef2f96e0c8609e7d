//! Flags, verbs, variables and endpoints of other servers.

#[cfg(test)]
pub(crate) mod endpoint_table;
#[cfg(test)]
pub(crate) mod flag_reference;
pub(crate) mod flag_table;
pub(crate) mod foreign_flag;
pub(crate) mod foreign_setting;
pub(crate) mod foreign_value;
pub(crate) mod foreign_variable;
pub(crate) mod foreign_verb;
pub(crate) mod unknown_flag;
