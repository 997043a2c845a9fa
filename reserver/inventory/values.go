package inventory

import (
	"encoding/hex"
	"strconv"
	"time"
)

// values writes a statement with its values in it. Statements over hundreds of rows are written so: as arguments, each
// value would cost the client more than the server spends on its row. Bytes are written as hexadecimal literals, so
// that nothing a buyer sends can end a literal.
type values struct{ b []byte }

func newValues(begin string) *values { return &values{append(make([]byte, 0, 4096), begin...)} }

// text adds a part of the statement.
func (v *values) text(s string) *values { v.b = append(v.b, s...); return v }

func (v *values) bytes(b []byte) *values {
	if len(b) == 0 {
		return v.text("''")
	}
	v.b = hex.AppendEncode(append(v.b, '0', 'x'), b)
	return v
}

func (v *values) num(n int64) *values { v.b = strconv.AppendInt(v.b, n, 10); return v }

func (v *values) time(t time.Time) *values {
	v.b = t.UTC().AppendFormat(v.b, "'2006-01-02 15:04:05.000000'")
	return v
}

// keys adds a table v of one column, key, whose rows are the keys in this order. To join a table to it makes the server look each
// key up. With IN and hundreds of keys, whatever index is named, it may find it cheaper to walk a small table, and would lock, and
// wait for, rows of others.
func (v *values) keys(keys [][]byte) *values {
	v.text("(SELECT `key` FROM JSON_TABLE('[")
	for i, k := range keys {
		v.next(i).text(`"`)
		v.b = hex.AppendEncode(v.b, k)
		v.text(`"`)
	}
	return v.text("]', '$[*]' COLUMNS (`key` VARCHAR(256) CHARACTER SET ascii PATH '$')) AS j) AS v")
}

// comma separates fields.
func (v *values) comma() *values { v.b = append(v.b, ','); return v }

// next begins the i-th element of a list.
func (v *values) next(i int) *values {
	if i > 0 {
		v.comma()
	}
	return v
}

func (v *values) String() string { return string(v.b) }
