//! Writes that leave the old file or the new one, never half of either.

use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// Writes `path` through `fill`: into a temporary file beside it, synced, then renamed over it. If anything fails, the temporary
/// file is removed and `path` is as it was. Links are followed; a device or a pipe is written to directly, since it can't be
/// replaced.
///
/// # Errors
/// If the folder is not writable, the disk is full, or `fill` fails.
pub fn write(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<()> {
    write_sized(path, None, fill)
}

/// As [`write()`]; `bytes` is the size that the file will have, for the message about a full disk.
///
/// # Errors
/// As [`write()`].
pub fn write_sized(path: &Path, bytes: Option<u64>, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<()> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    // `/dev/stdout` may stand for a regular file that others write to as well: it is no file to replace either.
    let is_stdout = path == Path::new("/dev/stdout");
    if is_stdout || fs::metadata(&target).is_ok_and(|m| !m.is_file() && !m.is_dir()) {
        let through = || -> io::Result<()> {
            let open = if is_stdout {
                File::from(io::stdout().as_fd().try_clone_to_owned()?)
            } else {
                OpenOptions::new().write(true).open(&target)?
            };
            let mut out = BufWriter::new(open);
            fill(&mut out)?;
            out.flush()
        };
        return through().map_err(|error| Error::io("can't write", path, error));
    }
    // With the process's number: two processes that write the same file don't share a temporary one.
    let temporary = hidden_beside(&target, &format!("{}.part", std::process::id()));
    let attempt = || -> io::Result<()> {
        let mut out = BufWriter::new(File::create(&temporary)?);
        fill(&mut out)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        fs::rename(&temporary, &target)?;
        sync_folder(target.parent())
    };
    attempt().map_err(|error| {
        // The first error is the one to report; a leftover that can't be removed either is named like a temporary file.
        let _removed = fs::remove_file(&temporary);
        Error::io("can't write", path, with_free_space(error, path, bytes))
    })
}

/// What a full disk's error has to tell beside its name: the bytes that are needed for `path`, where known, and those that are
/// free. Any other error is passed on as it is.
pub fn with_free_space(error: io::Error, path: &Path, needed: Option<u64>) -> io::Error {
    if !matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
        return error;
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Ok(disk) = rustix::fs::statvfs(folder) else { return error };
    let needed = needed.map_or_else(String::new, |bytes| format!("{bytes} bytes are needed, "));
    io::Error::new(error.kind(), format!("{error}: {needed}{} bytes are free", disk.f_bavail * disk.f_frsize))
}

/// Refuses `bytes` that the disk of `path` has no room for, before anything is written. A quota shows only in writing.
///
/// # Errors
/// If fewer bytes are free: both numbers.
pub fn need_space(path: &Path, bytes: u64) -> Result<()> {
    let there = path.ancestors().skip(1).find(|folder| folder.exists()).unwrap_or(Path::new("."));
    match rustix::fs::statvfs(there) {
        Ok(disk) if disk.f_bavail.saturating_mul(disk.f_frsize) < bytes => {
            let full = io::Error::from(io::ErrorKind::StorageFull);
            Err(Error::io("can't write", path, with_free_space(full, &there.join("x"), Some(bytes))))
        }
        _ => Ok(()),
    }
}

/// Writes a whole folder through `fill`, which gets a temporary folder beside `path`; every file in it is synced, then the folder
/// takes `path`'s place. An existing `path` is replaced; until the new one stands, the old one is kept as `.NAME.old`.
///
/// # Errors
/// As [`write()`]; `fill`'s own error is passed on.
pub fn write_folder<E: From<Error>>(
    path: &Path,
    fill: impl FnOnce(&Path) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let temporary = hidden_beside(path, "part");
    let io = |error| Error::io("can't write", path, with_free_space(error, path, None));
    let clear = |folder: &Path| if folder.exists() { fs::remove_dir_all(folder) } else { Ok(()) };
    let retired = hidden_beside(path, "old");
    clear(&temporary).map_err(io)?;
    fs::create_dir_all(&temporary).map_err(io)?;
    let filled = fill(&temporary).and_then(|()| {
        let finish = || -> io::Result<()> {
            for entry in fs::read_dir(&temporary)? {
                File::open(entry?.path())?.sync_all()?;
            }
            sync_folder(Some(&temporary))?;
            if path.exists() {
                clear(&retired)?;
                fs::rename(path, &retired)?;
            }
            fs::rename(&temporary, path)?;
            sync_folder(path.parent())?;
            clear(&retired)
        };
        finish().map_err(|error| E::from(io(error)))
    });
    if filled.is_err() {
        let _removed = clear(&temporary);
    }
    filled
}

/// Whether a file or folder of this name is what an interrupted write left.
pub fn is_leftover(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with('.') && (name.ends_with(".part") || name.ends_with(".old")))
}

/// `.NAME.part` and `.NAME.PROCESS.part` beside `path` are unfinished writes, `.NAME.old` is what one is about to replace.
fn hidden_beside(path: &Path, ending: &str) -> PathBuf {
    let name = path.file_name().map_or_else(Default::default, |n| n.to_string_lossy());
    path.with_file_name(format!(".{name}.{ending}"))
}

fn sync_folder(folder: Option<&Path>) -> io::Result<()> {
    match folder {
        Some(folder) if folder.as_os_str().is_empty() => File::open(".")?.sync_all(),
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// Writes text atomically.
///
/// # Errors
/// As [`write()`].
pub fn write_text(path: &Path, text: &str) -> Result<()> {
    write_sized(path, Some(text.len() as u64), |out| out.write_all(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_and_pipes_are_not_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let (real, link, pipe) = (folder.path().join("real"), folder.path().join("link"), folder.path().join("pipe"));
        write_text(&real, "old").expect("writable");
        std::os::unix::fs::symlink(&real, &link).expect("a link");
        write_text(&link, "new").expect("writable");
        assert_eq!(fs::read_to_string(&real).expect("the target"), "new");
        assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
        assert!(made.success());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read_to_string(pipe).expect("readable")
        });
        write_text(&pipe, "through").expect("writable");
        assert_eq!(reader.join().expect("it read"), "through");
        assert!(!fs::metadata(&pipe).expect("there").is_file());
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_trace() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("card.toml");
        write_text(&path, "old").expect("writable");
        let failed = write(&path, |out| {
            out.write_all(b"half of the ne")?;
            Err(io::Error::other("disk full"))
        });
        assert!(failed.expect_err("it failed").to_string().contains("card.toml: disk full"));
        assert_eq!(fs::read_to_string(&path).expect("still there"), "old");
        assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 1);
    }
}
