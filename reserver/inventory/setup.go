package inventory

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"database/sql"
	"database/sql/driver"
	_ "embed"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
)

//go:embed schema.sql
var schemaSQL string

// schemaVersion is raised with every change of schema.sql.
const schemaVersion = 3

// Options of Open.
type Options struct {
	// DSN in the form of go-sql-driver/mysql: user:password@tcp(host:port)/database
	DSN string
	// CA is a PEM bundle that the server's certificate must chain to; empty means what the DSN says.
	CA []byte
	// MaxConns bounds the connection pool; default 8.
	MaxConns int
	// OnHold, if not nil, is told how long each transaction had a connection, by caller: claim, confirm, sweep, ...
	OnHold func(caller string, d time.Duration)
}

// Open prepares a pool; it does not connect. A DSN that cannot be used is a *SetupError.
func Open(o Options) (*Store, error) {
	cfg, err := mysql.ParseDSN(o.DSN)
	if err != nil {
		return nil, &SetupError{Reason: ReasonInvalidDSN, Message: "the DSN cannot be read: expected user:password@tcp(host:port)/database"}
	}
	if cfg.DBName == "" {
		return nil, &SetupError{Reason: ReasonInvalidDSN, Message: "the DSN names no database: expected user:password@tcp(host:port)/database"}
	}
	if len(o.CA) > 0 {
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(o.CA) {
			return nil, &SetupError{Reason: ReasonInvalidDSN, Message: "ca.crt holds no PEM certificate"}
		}
		cfg.TLS = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12} // the driver adds the server's name
	}
	cfg.ParseTime, cfg.Loc = true, time.UTC
	cfg.InterpolateParams = true // one round trip per statement; safe with the UTF-8 character sets used here
	cfg.ClientFoundRows = false  // counts of changed rows are checked throughout
	cfg.MultiStatements = true   // statements travel together; values come as arguments or hexadecimal literals only
	if cfg.Timeout == 0 {
		cfg.Timeout = 3 * time.Second
	}
	if cfg.ReadTimeout == 0 {
		cfg.ReadTimeout = 15 * time.Second // COMMIT has no context of its own
	}
	if cfg.WriteTimeout == 0 {
		cfg.WriteTimeout = 15 * time.Second
	}
	cfg.Params = map[string]string{
		"time_zone": "'+00:00'",
		"sql_mode":  "'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO,NO_ZERO_DATE,NO_ZERO_IN_DATE'",
		// A transaction here takes milliseconds; whoever waits longer is better off trying again.
		"innodb_lock_wait_timeout": "3",
		// A node that vanished without closing its connections must not keep units, and the sale's row, locked for hours.
		"wait_timeout": "15",
	}
	cfg.Logger = &mysql.NopLogger{} // errors are returned as well; the driver's own lines would repeat them without context
	patient := cfg.Clone()
	patient.ReadTimeout = 0 // bounded by the audit's context: a statement over millions of rows takes its time
	maxConns := o.MaxConns
	if maxConns == 0 {
		maxConns = 8
	}
	store := &Store{onHold: o.OnHold}
	if store.db, err = openPool(cfg, maxConns); err == nil {
		store.audits, err = openPool(patient, 1)
	}
	if err != nil {
		return nil, &SetupError{Reason: ReasonInvalidDSN, Message: "the DSN cannot be used", Err: err}
	}
	return store, nil
}

func openPool(cfg *mysql.Config, maxConns int) (*sql.DB, error) {
	inner, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector{inner})
	db.SetMaxOpenConns(maxConns)
	db.SetMaxIdleConns(maxConns)
	db.SetConnMaxIdleTime(10 * time.Second) // below wait_timeout
	return db, nil
}

// connector makes connections of isolation READ COMMITTED: REPEATABLE READ locks gaps of empty ranges, and its snapshot is
// older than the locks it waits for. It is a statement and no parameter, whose name differs between MySQL and MariaDB.
type connector struct{ driver.Connector }

// Connect connects.
func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	_, err = conn.(driver.ExecerContext).ExecContext(ctx, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", nil)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

var leadingVersion = regexp.MustCompile(`^(\d+)\.(\d+)`)

// Check proves that the server can keep the promises made with it: a version with SKIP LOCKED, READ COMMITTED, writable, room
// for connections. Run it before Migrate; Probe completes it afterwards. Failures are *SetupError. A server that works but
// may lose commits in a crash gets a warning, of reason ReasonNotDurable.
func (s *Store) Check(ctx context.Context) (warning *SetupError, err error) {
	q := s.queries("check")
	var version string
	var flush, syncBinlog, maxConnections int
	var binlog, readOnly bool
	err = q.row(ctx, "SELECT VERSION(), @@innodb_flush_log_at_trx_commit, @@sync_binlog, @@log_bin, @@read_only, @@max_connections").
		Scan(&version, &flush, &syncBinlog, &binlog, &readOnly, &maxConnections)
	if err != nil {
		return nil, AsSetupError(fmt.Errorf("asking for the server's settings: %w", err))
	}
	isolationVariable := "transaction_isolation"
	if m := leadingVersion.FindStringSubmatch(version); m != nil {
		major, _ := strconv.Atoi(m[1])
		minor, _ := strconv.Atoi(m[2])
		maria := strings.Contains(version, "MariaDB")
		if !maria && major < 8 || maria && (major < 10 || major == 10 && minor < 6) {
			return nil, &SetupError{Reason: ReasonUnsupportedDatabase,
				Message: fmt.Sprintf("the server is %s, which lacks SKIP LOCKED: use MySQL 8.0+ or MariaDB 10.6+", version)}
		}
		if maria {
			isolationVariable = "tx_isolation"
		}
	}
	var isolation string
	if err := q.row(ctx, "SELECT @@SESSION."+isolationVariable).Scan(&isolation); err != nil {
		return nil, AsSetupError(fmt.Errorf("asking for the isolation: %w", err))
	}
	if isolation != "READ-COMMITTED" {
		return nil, &SetupError{Reason: ReasonUnsupportedDatabase,
			Message: fmt.Sprintf("the session's isolation is %s although READ-COMMITTED was asked for: remove the proxy that changes it", isolation)}
	}
	if readOnly {
		return nil, &SetupError{Reason: ReasonReadOnly, Message: "the server is read-only: point the Secret at the primary, or SET GLOBAL read_only=0"}
	}
	if maxConnections < minConnections {
		return nil, &SetupError{Reason: ReasonTooManyConnections, Message: fmt.Sprintf(
			"max_connections is %d, too few for reservation pods (16 each), sweeper (4) and operator (9): set it to %d or more", maxConnections, minConnections)}
	}
	if flush != 1 || binlog && syncBinlog != 1 {
		return &SetupError{Reason: ReasonNotDurable, Message: fmt.Sprintf(
			"a crash of the server would lose committed claims: set innodb_flush_log_at_trx_commit=1 (is %d) and sync_binlog=1 (is %d)", flush, syncBinlog)}, nil
	}
	return nil, nil
}

// minConnections is what one reservation pod, the sweeper and the operator need together.
const minConnections = 30

// Migrate creates or upgrades the tables, one process at a time, and can be repeated after a kill at any point.
// Failures are *SetupError.
func (s *Store) Migrate(ctx context.Context) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return AsSetupError(fmt.Errorf("connecting: %w", err))
	}
	defer func() { _ = conn.Close() }()
	var version sql.NullInt64
	err = conn.QueryRowContext(ctx, "SELECT MAX(version) FROM flashsale_schema").Scan(&version)
	switch {
	case err == nil && version.Int64 > schemaVersion:
		return &SetupError{Reason: ReasonNewerSchema, Message: fmt.Sprintf(
			"the tables are of schema version %d, this program knows %d: upgrade it, nothing was changed", version.Int64, schemaVersion)}
	case err == nil && version.Int64 == schemaVersion:
		return nil // the usual case needs no lock and no permission to create tables
	}
	var locked sql.NullInt64
	if err := conn.QueryRowContext(ctx, "SELECT GET_LOCK(CONCAT('flashsale.migrate.', LEFT(SHA2(DATABASE(), 256), 32)), 10)").Scan(&locked); err != nil {
		return AsSetupError(fmt.Errorf("taking the migration lock: %w", err))
	}
	if locked.Int64 != 1 {
		return &SetupError{Reason: ReasonDatabaseError, Message: "another process is migrating the schema: waiting for it"}
	}
	defer func() {
		_, _ = conn.ExecContext(context.WithoutCancel(ctx), "DO RELEASE_LOCK(CONCAT('flashsale.migrate.', LEFT(SHA2(DATABASE(), 256), 32)))")
	}()
	for _, statement := range statements(schemaSQL) {
		_, err := conn.ExecContext(ctx, statement)
		var my *mysql.MySQLError
		if errors.As(err, &my) && my.Number == 1060 { // ER_DUP_FIELDNAME: the column was added before
			continue
		}
		if err != nil {
			return AsSetupError(fmt.Errorf("creating tables: %w", err))
		}
	}
	_, err = conn.ExecContext(ctx, "INSERT IGNORE INTO flashsale_schema (version, applied_at) VALUES (?, UTC_TIMESTAMP(6))", schemaVersion)
	if err != nil {
		return AsSetupError(fmt.Errorf("recording the schema's version: %w", err))
	}
	return nil
}

// statements splits a file of statements, each ended by a semicolon at the end of a line.
func statements(file string) []string {
	var all []string
	for s := range strings.SplitSeq(file, ";\n") {
		if strings.TrimSpace(s) != "" {
			all = append(all, s)
		}
	}
	return all
}

// Probe finds servers that accept the claim's statements and do not do what they say: tables in an engine without row
// locks, or SKIP LOCKED that takes no lock. Run it after Migrate. Failures are *SetupError.
func (s *Store) Probe(ctx context.Context) error {
	var table, engine string
	err := s.queries("probe").row(ctx, `SELECT TABLE_NAME, COALESCE(ENGINE, '?') FROM information_schema.TABLES
		WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME LIKE 'flashsale\_%' AND ENGINE <> 'InnoDB' LIMIT 1`).Scan(&table, &engine)
	if err == nil {
		return &SetupError{Reason: ReasonUnsupportedEngine, Message: fmt.Sprintf(
			"table %s uses %s, which has no row locks: ALTER TABLE %s ENGINE=InnoDB", table, engine, table)}
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return AsSetupError(fmt.Errorf("asking for the tables' engine: %w", err))
	}
	return s.inTx(ctx, "probe", func(first *queries) error {
		// Without SKIP LOCKED: another process may be probing, and its lock would look like a missing row.
		var version int
		err := first.row(ctx, "SELECT version FROM flashsale_schema WHERE version = ? FOR UPDATE", schemaVersion).Scan(&version)
		if errors.Is(err, sql.ErrNoRows) {
			return &SetupError{Reason: ReasonNewerSchema, Message: fmt.Sprintf("the tables are not of schema version %d: run the operator of this program's version", schemaVersion)}
		}
		if err != nil {
			return AsSetupError(fmt.Errorf("locking a row: %w", err))
		}
		return s.inTx(ctx, "probe", func(second *queries) error {
			err := second.row(ctx, "SELECT version FROM flashsale_schema WHERE version = ? FOR UPDATE SKIP LOCKED", schemaVersion).Scan(&version)
			if errors.Is(err, sql.ErrNoRows) {
				return nil
			}
			if err != nil {
				return AsSetupError(fmt.Errorf("skipping a locked row: %w", err))
			}
			return &SetupError{Reason: ReasonUnsupportedDatabase,
				Message: "the server gave two connections the same locked row, so it would sell units twice: use MySQL 8.0+"}
		})
	})
}

// Setup runs Check, Migrate and Probe.
func (s *Store) Setup(ctx context.Context) (warning *SetupError, err error) {
	if warning, err = s.Check(ctx); err != nil {
		return nil, err
	}
	if err := s.Migrate(ctx); err != nil {
		return nil, err
	}
	return warning, s.Probe(ctx)
}

// Now is the database's time.
func (s *Store) Now(ctx context.Context) (now time.Time, err error) {
	if err := s.queries("clock").row(ctx, "SELECT UTC_TIMESTAMP(6)").Scan(&now); err != nil {
		return now, fmt.Errorf("reading the database's clock: %w", err)
	}
	return now, nil
}
