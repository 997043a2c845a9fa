package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/redis/go-redis/v9"
)

// servers are those under test.
type servers struct {
	config *mysql.Config
	admin  *sql.DB
	redis  *redis.Client // nil when no scenario needs it
	pids   []int         // of those on this machine, for their CPU time
}

func connect(ctx context.Context, withRedis bool) (*servers, error) {
	dsn := os.Getenv("FLASHSALE_MYSQL_DSN")
	if dsn == "" {
		return nil, errors.New("FLASHSALE_MYSQL_DSN is not set; hack/bench/bench.sh starts the servers and sets it")
	}
	config, err := mysql.ParseDSN(dsn)
	if err != nil || config.DBName == "" {
		return nil, errors.New("FLASHSALE_MYSQL_DSN: expected user:password@tcp(host:port)/database")
	}
	s := &servers{config: config}
	if s.admin, err = sql.Open("mysql", dsn); err != nil {
		return nil, fmt.Errorf("connecting to MySQL: %w", err)
	}
	var pidFile string
	if err := s.admin.QueryRowContext(ctx, "SELECT @@pid_file").Scan(&pidFile); err != nil {
		return nil, fmt.Errorf("connecting to MySQL: %w", err)
	}
	if pid, err := os.ReadFile(filepath.Clean(pidFile)); err == nil && isLocal(config.Addr) {
		s.addPID(string(pid))
	}
	if !withRedis {
		return s, nil
	}
	address := os.Getenv("FLASHSALE_REDIS_ADDR")
	if address == "" {
		return nil, errors.New("FLASHSALE_REDIS_ADDR is not set; hack/bench/bench.sh starts the servers and sets it")
	}
	s.redis = redis.NewClient(&redis.Options{Addr: address})
	keys, err := s.redis.DBSize(ctx).Result()
	if err != nil {
		return nil, fmt.Errorf("connecting to Redis: %w", err)
	}
	if keys > 0 {
		return nil, fmt.Errorf("the Redis at %s holds %d keys, and the benchmark would flush them: give it an empty one", address, keys)
	}
	if isLocal(address) {
		s.addPID(s.redisInfo(ctx, "process_id"))
	}
	return s, nil
}

func (s *servers) close() error {
	var err error
	if s.redis != nil {
		err = s.redis.Close()
	}
	return errors.Join(err, s.admin.Close())
}

func isLocal(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip := net.ParseIP(host)
	return err == nil && (host == "localhost" || ip != nil && ip.IsLoopback())
}

func (s *servers) addPID(text string) {
	if pid, err := strconv.Atoi(strings.TrimSpace(text)); err == nil {
		s.pids = append(s.pids, pid)
	}
}

func (s *servers) redisInfo(ctx context.Context, field string) string {
	info, err := s.redis.Info(ctx).Result()
	if m := regexp.MustCompile(`(?m)^` + field + `:(.*?)\r?$`).FindStringSubmatch(info); err == nil && m != nil {
		return m[1]
	}
	return "?"
}

// serverCPU is the CPU time the servers have used. The kernel counts it in ticks of 10 ms.
func (s *servers) serverCPU() time.Duration {
	var ticks int64
	for _, pid := range s.pids {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		// The second field is the name, in parentheses; it may hold spaces.
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		for _, f := range fields[11:13] { // utime, stime
			n, _ := strconv.ParseInt(f, 10, 64)
			ticks += n
		}
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// scratch makes an empty database, so that no measurement pays for what the one before left behind.
func (s *servers) scratch(ctx context.Context) (dsn string, drop func(), err error) {
	name := s.config.DBName + "_bench_" + strings.ToLower(rand.Text()[:8])
	if _, err := s.admin.ExecContext(ctx, "CREATE DATABASE "+name); err != nil {
		return "", nil, fmt.Errorf("creating a database: %w", err)
	}
	config := s.config.Clone()
	config.DBName = name
	return config.FormatDSN(), func() {
		if _, err := s.admin.ExecContext(context.WithoutCancel(ctx), "DROP DATABASE "+name); err != nil {
			fmt.Fprintf(os.Stderr, "bench: dropping database %s: %v\n", name, err)
		}
	}, nil
}

// openSQL opens a pool for the plain SQL systems, with the session settings of the product's.
func openSQL(dsn string, conns int) (*sql.DB, error) {
	config, err := mysql.ParseDSN(dsn)
	if err != nil {
		return nil, err
	}
	config.InterpolateParams = true // one round trip per statement
	config.ParseTime = true
	config.Params = map[string]string{"transaction_isolation": "'READ-COMMITTED'"}
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	return db, nil
}

func execAll(ctx context.Context, db *sql.DB, statements ...string) error {
	for _, s := range statements {
		if _, err := db.ExecContext(ctx, s); err != nil {
			return fmt.Errorf("%.60s: %w", s, err)
		}
	}
	return nil
}

// numbers is a table expression with the column n, from 1 up; the statement's first keyword needs the hint.
func numbers(last int64) (hint, from string) {
	return fmt.Sprintf("/*+ SET_VAR(cte_max_recursion_depth=%d) */", last),
		fmt.Sprintf("(WITH RECURSIVE seq (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM seq WHERE n < %d) SELECT n FROM seq) numbers", last)
}

func inTx(ctx context.Context, db *sql.DB, f func(tx *sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := f(tx); err != nil {
		_ = tx.Rollback()
		return err
	}
	return tx.Commit()
}

// isConflict is true when the server rolled the transaction back for another's sake.
func isConflict(err error) bool {
	var my *mysql.MySQLError
	return errors.As(err, &my) && (my.Number == 1213 || my.Number == 1205)
}
