//! Samples for other trainers: one parquet row each, with `input_ids`, `labels` and `id`, as TRL and transformers read them.

use std::path::Path;

use polars::prelude::{Column, DataFrame, IntoColumn, ListChunked, NamedFrom, ParquetWriter, PlSmallStr, Series};
use weact_core::{io::atomic, sample::Sample};

use crate::{Error, Result};

/// The label of a token that does not count.
pub const IGNORED: i64 = -100;

/// Writes `samples`, atomically. `labels[i]` is `input_ids[i]` where that token is supervised, else [`IGNORED`]: trainers shift by themselves.
///
/// # Errors
/// If there is no sample, or the file can't be written.
pub fn write_parquet(path: &Path, samples: &[Sample]) -> Result<()> {
    if samples.is_empty() {
        return Err(Error::Other(format!("{}: there is no sample to write", path.display())));
    }
    let ids = |sample: &Sample| sample.ids.iter().map(|id| i64::from(*id)).collect::<Vec<i64>>();
    let labels = |sample: &Sample| -> Vec<i64> {
        let token = |(id, counts): (&u32, &bool)| if *counts { i64::from(*id) } else { IGNORED };
        sample.ids.iter().zip(&sample.mask).map(token).collect()
    };
    let names: Vec<&str> = samples.iter().map(|sample| sample.id.as_str()).collect();
    let columns = vec![
        list("input_ids", samples.iter().map(ids)),
        list("labels", samples.iter().map(labels)),
        Series::new("id".into(), names).into_column(),
    ];
    let mut frame = DataFrame::new(samples.len(), columns).expect("columns of one length");
    let fill = |out: &mut std::io::BufWriter<std::fs::File>| {
        ParquetWriter::new(out).finish(&mut frame).map(drop).map_err(std::io::Error::other)
    };
    Ok(atomic::write(path, fill)?)
}

fn list(name: &str, rows: impl Iterator<Item = Vec<i64>>) -> Column {
    let rows = rows.map(|row| Some(Series::new(PlSmallStr::EMPTY, row)));
    rows.collect::<ListChunked>().with_name(name.into()).into_column()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use polars::prelude::{AnyValue, ParquetReader, SerReader};
    use weact_core::Capability;

    use super::*;

    fn sample(id: &str, ids: &[u32], mask: &[bool]) -> Sample {
        let capability = Capability::new("search").expect("a legal name");
        Sample {
            id: id.to_owned(),
            capability,
            ids: ids.to_vec(),
            mask: mask.to_vec(),
            left_out: Default::default(),
            dropped_exchanges: 0,
        }
    }

    #[test]
    fn rows_read_back_as_the_samples() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("rows.parquet");
        let samples = [sample("a#0", &[5, 6, 151_645], &[false, true, true]), sample("b#1", &[7], &[false])];
        write_parquet(&path, &samples).expect("written");
        let frame = ParquetReader::new(File::open(&path).expect("a file")).finish().expect("parquet");
        assert_eq!(frame.get_column_names(), ["input_ids", "labels", "id"]);
        let column = |name: &str| frame.column(name).expect("a column");
        let list = |name: &str, row: usize| -> Vec<i64> {
            match column(name).get(row).expect("a row") {
                AnyValue::List(list) => list.iter().map(|n| n.try_extract().expect("a number")).collect(),
                other => panic!("{other:?} is no list"),
            }
        };
        assert_eq!([list("input_ids", 0), list("input_ids", 1)], [vec![5, 6, 151_645], vec![7]]);
        assert_eq!([list("labels", 0), list("labels", 1)], [vec![-100, 6, 151_645], vec![-100]]);
        let ids = [0, 1].map(|row| column("id").get(row).expect("a row").to_string());
        assert_eq!(ids, ["\"a#0\"", "\"b#1\""]);
        assert!(write_parquet(&dir.path().join("none.parquet"), &[]).is_err());
        assert!(!dir.path().join("none.parquet").exists());
    }
}
