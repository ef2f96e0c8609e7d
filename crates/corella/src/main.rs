//! The `corella` command.

#[cfg(test)]
mod command_line_reference;

fn main() {
    corella::run_command(std::env::args_os().collect())
}
