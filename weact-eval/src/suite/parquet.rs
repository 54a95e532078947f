//! Parquet files as rows.

use std::{fs::File, path::Path};

use polars::prelude::{AnyValue, ParquetReader, SerReader, Series};
use serde_json::{Map, Number, Value};

use super::rows::Row;
use crate::{Error, Result};

/// Reads all rows; lists become arrays and structs objects. What JSON has no like of, as bytes, dates and NaN, is refused.
pub(super) fn read(path: &Path) -> Result<Vec<Row>> {
    let wrong = |why: String| Error::from(weact_core::Error::file(path, why));
    let file = File::open(path).map_err(|e| weact_core::Error::io("can't open", path, e))?;
    let frame = ParquetReader::new(file).finish().map_err(|e| wrong(format!("is no parquet file that can be read: {e}")))?;
    let mut rows: Vec<Row> = (1..=frame.height())
        .map(|number| Row { place: format!("{}: row {number}", path.display()), fields: Map::new() })
        .collect();
    if rows.is_empty() {
        return Err(wrong("has no rows".to_owned()));
    }
    for column in frame.columns() {
        let name = column.name().to_string();
        for (i, row) in rows.iter_mut().enumerate() {
            let cell = column.get(i).map_err(|e| wrong(format!("column {name}: {e}")))?;
            let value = value(&cell).map_err(|why| row.error(format!("column {name}: {why}")))?;
            row.fields.insert(name.clone(), value);
        }
    }
    Ok(rows)
}

/// What a cell holds, or why it can't be read.
type Cell<T> = std::result::Result<T, String>;

fn value(cell: &AnyValue<'_>) -> Cell<Value> {
    Ok(match cell {
        AnyValue::Null => Value::Null,
        AnyValue::Boolean(b) => Value::from(*b),
        AnyValue::String(s) => Value::from(*s),
        AnyValue::StringOwned(s) => Value::from(s.as_str()),
        AnyValue::UInt8(n) => Value::from(*n),
        AnyValue::UInt16(n) => Value::from(*n),
        AnyValue::UInt32(n) => Value::from(*n),
        AnyValue::UInt64(n) => Value::from(*n),
        AnyValue::Int8(n) => Value::from(*n),
        AnyValue::Int16(n) => Value::from(*n),
        AnyValue::Int32(n) => Value::from(*n),
        AnyValue::Int64(n) => Value::from(*n),
        AnyValue::Float32(x) => number(f64::from(*x))?,
        AnyValue::Float64(x) => number(*x)?,
        AnyValue::List(series) => list(series)?,
        AnyValue::Struct(..) | AnyValue::StructOwned(_) => structure(cell)?,
        other => return Err(format!("values of type {} are not supported: write the column as text", other.dtype())),
    })
}

fn number(x: f64) -> Cell<Value> {
    Number::from_f64(x).map(Value::Number).ok_or_else(|| format!("{x} is no number that JSON has"))
}

fn list(series: &Series) -> Cell<Value> {
    series.iter().map(|item| value(&item)).collect::<Cell<Vec<Value>>>().map(Value::Array)
}

fn structure(cell: &AnyValue<'_>) -> Cell<Value> {
    let names: Vec<String> = match cell {
        AnyValue::Struct(_, _, fields) => fields.iter().map(|field| field.name().to_string()).collect(),
        AnyValue::StructOwned(owned) => owned.1.iter().map(|field| field.name().to_string()).collect(),
        _ => unreachable!("only structs come here"),
    };
    let fields = names.into_iter().zip(cell._iter_struct_av());
    fields.map(|(name, item)| Ok((name, value(&item)?))).collect::<Cell<Map<String, Value>>>().map(Value::Object)
}

#[cfg(test)]
mod tests {
    use polars::{
        df,
        prelude::{IntoSeries, ListChunked, NamedFrom, ParquetWriter, StructChunked},
    };
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_structs_and_nulls_come_back_as_json() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("rows.parquet");
        let mut frame = df!("question_id" => [7_i64, 8], "answer" => [Some("I"), None]).expect("a frame");
        let options = [Series::new("".into(), ["a", "b"]), Series::new("".into(), ["c"])];
        let options: ListChunked = options.into_iter().map(Some).collect();
        let mut options = options.into_series();
        options.rename("options".into());
        let parts = [Series::new("steps".into(), ["x", "y"]), Series::new("n".into(), [1.5, 2.0])];
        let metadata = StructChunked::from_series("metadata".into(), 2, parts.iter()).expect("two rows").into_series();
        frame.with_column(options.into()).expect("two rows");
        frame.with_column(metadata.into()).expect("two rows");
        ParquetWriter::new(File::create(&path).expect("a file")).finish(&mut frame).expect("written");
        let rows = read(&path).expect("rows");
        let expected = json!({"question_id": 7, "answer": "I", "options": ["a", "b"], "metadata": {"steps": "x", "n": 1.5}});
        assert_eq!(Value::Object(rows[0].fields.clone()), expected);
        assert_eq!((&rows[1].fields["answer"], &rows[1].fields["options"]), (&Value::Null, &json!(["c"])));
        let mut frame = df!("x" => [f64::NAN]).expect("a frame");
        ParquetWriter::new(File::create(&path).expect("a file")).finish(&mut frame).expect("written");
        let error = read(&path).expect_err("not JSON").to_string();
        assert!(error.contains("rows.parquet: row 1: column x: NaN"), "{error}");
        let mut frame = df!("x" => [Some(&b"bytes"[..])]).expect("a frame");
        ParquetWriter::new(File::create(&path).expect("a file")).finish(&mut frame).expect("written");
        assert!(read(&path).expect_err("not JSON").to_string().contains("column x: values of type"));
        std::fs::write(&path, "PAR1 no").expect("a file");
        assert!(read(&path).expect_err("cut off").to_string().contains("rows.parquet"));
    }
}
