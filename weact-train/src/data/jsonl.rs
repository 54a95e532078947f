//! Trajectories to a file.

use std::{
    io::{self, Write},
    path::Path,
};

use weact_core::{io::atomic, trajectory::Trajectory};

use crate::Result;

/// Writes one trajectory a line, as [`weact_core::trajectory::read`] reads them. The file is whole or as it was.
///
/// # Errors
/// If the file can't be written.
pub fn write_jsonl(path: &Path, trajectories: &[Trajectory]) -> Result<()> {
    atomic::write(path, |out| {
        for trajectory in trajectories {
            serde_json::to_writer(&mut *out, trajectory).map_err(io::Error::from)?;
            out.write_all(b"\n")?;
        }
        Ok(())
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use weact_core::{
        message::{Message, Role},
        trajectory,
    };

    use super::*;

    #[test]
    fn written_trajectories_read_back_equal() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("rows.jsonl");
        let row = |id: &str| {
            let messages = vec![Message::text(Role::Assistant, "a\n\u{2028}b")];
            Trajectory::new(id.to_owned(), Vec::new(), messages, Vec::new()).expect("no spans")
        };
        let rows = [row("1"), row("2")];
        write_jsonl(&path, &rows).expect("a writable file");
        assert_eq!(trajectory::read(&path).expect("valid lines"), rows);
    }
}
