//! Runs a command under the stress of `shake`.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::process_tree::{StoppedTree, kill_tree};

const POLL_INTERVAL: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_millis(300);
/// The longest time between two pauses; the shortest is near zero.
const MAX_RUNNING_MS: u64 = 1500;
/// The increase of the time from one pause to the next, modulo `MAX_RUNNING_MS`. The two have no common factor, so that
/// all times come up.
const RUNNING_STEP_MS: u64 = 377;
/// A command without output for this long hangs.
const HANGS_AFTER: Duration = Duration::from_secs(20 * 60);

#[derive(Debug)]
pub enum End {
    Exited(ExitStatus),
    /// The command wrote nothing for 20 minutes, and was killed.
    Hung,
}

/// Runs a command with its output in a file until it ends, with pauses if asked for.
pub fn run(command: &mut Command, output: &Path, has_pauses: bool) -> Result<End, String> {
    run_for(command, output, has_pauses, HANGS_AFTER)
}

fn run_for(
    command: &mut Command,
    output: &Path,
    has_pauses: bool,
    hangs_after: Duration,
) -> Result<End, String> {
    let at = |error| format!("{}: {error}", output.display());
    let file = File::create(output).map_err(at)?;
    command.stdin(Stdio::null());
    command.stdout(file.try_clone().map_err(at)?).stderr(file);
    let child = command.spawn();
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = child.map_err(|error| format!("{program} did not start: {error}"))?;
    let end = watch(&mut child, output, has_pauses, hangs_after);
    let _ = child.wait();
    end.map_err(|error| format!("{program}: {error}"))
}

fn watch(
    child: &mut Child,
    output: &Path,
    has_pauses: bool,
    hangs_after: Duration,
) -> std::io::Result<End> {
    let id = i32::try_from(child.id()).expect("the system's ids of processes have 31 bits");
    let mut running_ms = RUNNING_STEP_MS;
    let (mut num_bytes, mut written_at) = (0, Instant::now());
    let mut continued_at = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(End::Exited(status));
        }
        let written = fs::metadata(output).map_or(0, |metadata| metadata.len());
        if written != num_bytes {
            (num_bytes, written_at) = (written, Instant::now());
        }
        if written_at.elapsed() > hangs_after {
            kill_tree(id);
            return Ok(End::Hung);
        }
        if has_pauses && continued_at.elapsed() > Duration::from_millis(running_ms) {
            let stopped = StoppedTree::stop(id);
            thread::sleep(PAUSE);
            drop(stopped);
            continued_at = Instant::now();
            running_ms = (running_ms + RUNNING_STEP_MS) % MAX_RUNNING_MS;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::super::process_tree::tests::wait_until_gone;
    use super::*;

    fn output(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("xtask-shake-{}-{name}.txt", std::process::id()))
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn the_status_and_the_output_are_kept() {
        let path = output("status");
        let end = run(&mut shell("echo a; echo b >&2; exit 3"), &path, false);
        assert!(matches!(end, Ok(End::Exited(status)) if status.code() == Some(3)));
        assert_eq!(fs::read_to_string(&path).unwrap(), "a\nb\n");
        fs::remove_file(path).unwrap();
        let none = run(&mut Command::new("/no/program"), &output("none"), false);
        assert!(none.unwrap_err().contains("/no/program did not start"));
        let _ = fs::remove_file(output("none"));
    }

    #[test]
    fn a_command_that_writes_nothing_is_killed_with_all_that_it_started() {
        let path = output("hung");
        // The child has a group and a session of its own.
        let script = "setsid sleep 1000 & echo $!; sleep 1000";
        let mut hangs_after = Duration::from_millis(200);
        let id = loop {
            let end = run_for(&mut shell(script), &path, false, hangs_after);
            assert!(matches!(end, Ok(End::Hung)), "{end:?}");
            // A shell may take longer than `hangs_after` to start.
            match fs::read_to_string(&path).unwrap().trim().parse::<i32>() {
                Ok(id) => break id,
                Err(_) => hangs_after *= 2,
            }
        };
        wait_until_gone(id);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_command_that_is_stopped_goes_on() {
        let path = output("pauses");
        // A process that stopped itself, as if a test held it, stays stopped: it writes nothing.
        let script = "sh -c 'kill -STOP $$; echo wrong' & \
                      for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.2; done; kill -KILL $!";
        let mut command = shell(script);
        let end = run(&mut command, &path, true);
        assert!(
            matches!(end, Ok(End::Exited(status)) if status.success()),
            "{end:?}"
        );
        let text = fs::read_to_string(&path).unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words.join(""), "123456789");
        fs::remove_file(path).unwrap();
    }
}
