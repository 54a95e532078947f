//! The command `weact`. Flags, files and exit statuses are a contract that scripts rely on; the work is done by the libraries.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
