package inventory

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/go-sql-driver/mysql"
)

// secretKeys are the keys a database Secret may have: dsn alone, or those of the Service Binding specification.
var secretKeys = []string{"dsn", "host", "port", "username", "password", "database", "ca.crt"}

// SecretError says which key of a database Secret is missing. Its message never holds a value.
type SecretError struct{ Missing []string }

func (e *SecretError) Error() string {
	return fmt.Sprintf("the Secret lacks %s: give either dsn, or host, username, password and database (port and ca.crt are optional)", strings.Join(e.Missing, ", "))
}

// OptionsFromSecret reads the data of a Secret. The error is a *SecretError.
func OptionsFromSecret(data map[string][]byte) (Options, error) {
	value := func(key string) string { return strings.TrimSpace(string(data[key])) }
	o := Options{DSN: value("dsn"), CA: data["ca.crt"]}
	if o.DSN != "" {
		return o, nil
	}
	var missing []string
	for _, key := range []string{"host", "username", "password", "database"} {
		if _, ok := data[key]; !ok {
			missing = append(missing, key)
		}
	}
	if len(missing) == 4 {
		missing = []string{"dsn"}
	}
	if len(missing) > 0 {
		return o, &SecretError{missing}
	}
	port := value("port")
	if port == "" {
		port = "3306"
	}
	cfg := mysql.NewConfig()
	cfg.Net, cfg.Addr = "tcp", net.JoinHostPort(value("host"), port)
	cfg.User, cfg.Passwd, cfg.DBName = value("username"), value("password"), value("database")
	o.DSN = cfg.FormatDSN()
	return o, nil
}

// OptionsFromPath reads a folder where a Secret is mounted, or a file that holds a DSN.
func OptionsFromPath(path string) (Options, error) {
	info, err := os.Stat(path)
	if err != nil {
		return Options{}, fmt.Errorf("reading the database's Secret: %w", err)
	}
	if !info.IsDir() {
		dsn, err := os.ReadFile(path)
		if err != nil {
			return Options{}, fmt.Errorf("reading the database's DSN: %w", err)
		}
		return Options{DSN: strings.TrimSpace(string(dsn))}, nil
	}
	data := map[string][]byte{}
	for _, key := range secretKeys {
		b, err := os.ReadFile(filepath.Join(path, key))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return Options{}, fmt.Errorf("reading the database's Secret: %w", err)
		}
		data[key] = b
	}
	return OptionsFromSecret(data)
}
